"""What it costs to make sums independent of the order in which gradients arrive, in one interleaved run.

Run as `OMP_NUM_THREADS=1 python -m bench.order --results bench/results`.

Two ranks; one pushes a unit's gradients to the other and waits until they are added, under the default (fp32, in order
of arrival) and under `reproducible=True` (fp64, practically independent of the order). In each round every way runs
once, so that a machine with other work slows all of them alike. "times_default" is the median over rounds of a way's
time over the default's of that round, "least_times_default" the ratio of their shortest times, which other work touches
least.

The rows "add alone" have no ranks: a gradient of fp32 is added in private memory, in blocks of 1 MiB of the sum, to
fp32, to fp64 as torch does it for mixed types, and to fp64 by way of a converted block that stays in the cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from odc import Settings
from odc.bench.ranks import RankPool, held
from odc.bench.report import store
from odc.bench.units import MIB, drop, sharded_by
from odc.provenance import begin

OWNER = 1
WAYS = {
    "push, default": Settings(),
    "push, reproducible": Settings(reproducible=True),
}
_BLOCK_BYTES = 1 << 20


def build_all(chunk: int) -> None:
    """One unit of two chunks of `chunk` bytes of fp32 for each way, with open minibatches. Every rank calls it."""
    held.modules = {
        name: sharded_by("odc", 2 * chunk, torch.float32, "block", way, "cpu") for name, way in WAYS.items()
    }
    for module in held.modules.values():
        module.unshard()
        module.reshard()


class Push:
    """Pushes gradients of ones to the owner, and returns once it has added them."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        from odc.fsdp import root_of
        from odc.protocol import Gradient

        root = root_of(held.modules[name])
        self.member, self.layout, self.unit = root.member, root.layout, root.layout.units[0]
        self.gradients = [
            Gradient(i, torch.ones(2 * spec.numel, dtype=dtype)) for i, spec in enumerate(self.unit.params)
        ]

    @property
    def accumulator_bytes(self) -> int:
        """Of one rank."""
        return sum(nbytes for name, nbytes in self.layout.ledger().items() if "accumulator" in name)

    def __call__(self) -> None:
        self.member.pusher.push_to(OWNER, self.unit, self.gradients)
        ring = self.member.protocol.ring(OWNER, 0)
        while ring.added() != ring.posted():
            time.sleep(0)


def alone(numel: int) -> dict[str, Callable[[], None]]:
    """Ways to add `numel` elements without ranks, by name."""
    gradient, single, double = torch.ones(numel), torch.zeros(numel), torch.zeros(numel, dtype=torch.float64)
    converted = torch.empty(_BLOCK_BYTES // 8, dtype=torch.float64)

    def add(total: torch.Tensor) -> None:
        block = _BLOCK_BYTES // total.itemsize
        for start in range(0, numel, block):
            total[start : start + block].add_(gradient[start : start + block])

    def add_converted() -> None:
        for start in range(0, numel, len(converted)):
            part = double[start : start + len(converted)]
            part.add_(converted[: len(part)].copy_(gradient[start : start + len(part)]))

    return {
        "add alone, fp32": lambda: add(single),
        "add alone, fp64": lambda: add(double),
        "add alone, fp64, converted in the cache": add_converted,
    }


def interleaved(actions: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each action by round, after two rounds that are not counted."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds + 2):
        for name, action in actions.items():
            began = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - began)
    return {name: taken[2:] for name, taken in times.items()}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("runs/bench"))
    parser.add_argument("--mib", type=int, default=16, help="size of the pushed chunk in fp32")
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    begun = begin()
    rows = rows_of(interleaved(alone(arguments.mib * MIB // 4), arguments.rounds), arguments.mib, torch.float32)
    with RankPool(2, timeout_s=1800) as pool:
        pool.each(build_all, arguments.mib * MIB)
        for dtype in (torch.float32, torch.bfloat16):
            pushes = {name: Push(name, dtype) for name in WAYS}
            found = rows_of(interleaved(dict(pushes), arguments.rounds), arguments.mib, dtype)
            rows += [row | {"accumulator_bytes": pushes[row["what"]].accumulator_bytes} for row in found]
        pool.each(drop)
    title = "Sums that do not depend on the order of arrival: what they cost a push (measured)"
    store(arguments.results, "order", title, rows, begun=begun)


if __name__ == "__main__":
    main()
