"""What it costs to make sums independent of the order in which gradients arrive, in one interleaved run.

Run as `OMP_NUM_THREADS=1 python -m bench.order --results bench/results`.

Two ranks; one pushes a unit's gradients to the other and waits until they are added, under the default (fp32, in order
of arrival) and under `reproducible=True` (fp64, practically independent of the order). In each round every way runs
once, so that a machine with other work slows all of them alike. "times_default" is the median over rounds of a way's
time over the default's of that round, "least_times_default" the ratio of their shortest times, which other work touches
least.

The rows "add alone" have no ranks: a gradient of fp32 is added in private memory, in blocks of 1 MiB of the sum, to
fp32 and to fp64, as torch does it for mixed types.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from bench.script import Script
from bench.turns import Push, build_all, in_turns
from odc import Settings
from odc.bench.ranks import RankPool
from odc.bench.units import MIB, drop

WAYS = {
    "push, default": Settings(),
    "push, reproducible": Settings(reproducible=True),
}
_BLOCK_BYTES = 1 << 20


def accumulator_bytes(push: Push) -> int:
    """Of one rank."""
    return sum(nbytes for name, nbytes in push.layout.ledger().items() if "accumulator" in name)


def alone(numel: int) -> dict[str, Callable[[], None]]:
    """Ways to add `numel` elements without ranks, by name."""
    gradient = torch.ones(numel)
    totals = {"fp32": torch.zeros(numel), "fp64": torch.zeros(numel, dtype=torch.float64)}

    def add(total: torch.Tensor) -> None:
        block = _BLOCK_BYTES // total.itemsize
        for start in range(0, numel, block):
            total[start : start + block].add_(gradient[start : start + block])

    return {f"add alone, {name}": lambda total=total: add(total) for name, total in totals.items()}


def rows_of(times: dict[str, list[float]], mib: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """One row an action; the first is what the others are measured against."""
    base = next(iter(times.values()))
    return [
        {
            "what": name,
            "MiB": mib,
            "dtype": str(dtype)[6:],
            "median_ms": median(taken) * 1e3,
            "least_ms": min(taken) * 1e3,
            "times_default": median(mine / first for mine, first in zip(taken, base, strict=True)),
            "least_times_default": min(taken) / min(base),
        }
        for name, taken in times.items()
    ]


def main() -> None:
    script = Script(__doc__, mib=(16, "size of the pushed chunk in fp32"), rounds=(60, "of each way"))
    given = script.given
    rows = rows_of(in_turns(alone(given.mib * MIB // 4), given.rounds), given.mib, torch.float32)
    with RankPool(2, timeout_s=1800) as pool:
        pool.each(build_all, given.mib * MIB, WAYS)
        for dtype in (torch.float32, torch.bfloat16):
            pushes = {name: Push(name, dtype) for name in WAYS}
            found = rows_of(in_turns(pushes, given.rounds), given.mib, dtype)
            rows += [row | {"accumulator_bytes": accumulator_bytes(pushes[row["what"]])} for row in found]
        pool.each(drop)
    script.store("order", "Sums that do not depend on the order of arrival: what they cost a push (measured)", rows)


if __name__ == "__main__":
    main()
