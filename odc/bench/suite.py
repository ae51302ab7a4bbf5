"""`odc bench`: every case at every size and number of ranks, one table, one file.

Chose a suite inside the package over the repository's bench/ folder, which is not installed: whoever has odc can ask
what it does on their machine, and compare two machines or versions. bench/ holds the closer looks (pytest-benchmark),
made of the same parts. The price is that measuring code ships with the runtime; nothing else imports it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from odc.bench import exchanges, heaps, plans, sharded
from odc.bench.crew import Crew, apart, here
from odc.bench.report import facts, spread, table
from odc.bench.rounds import Prepare, Timed, measure, slowest
from odc.bench.units import drop
from odc.errors import ConfigError
from odc.memory import free_memory

SCHEMA = "odc-bench-1"
KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
SAMPLES = (512, 4096)
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Part:
    """One part of the suite.

    Args:
        prepare: makes its actions, on every rank.
        copies: of its size that it holds on one rank at once, at most; to refuse what does not fit.
        compiled: by compiled Triton kernels, so on CUDA alone.
        host: of memory of the host, so on the CPU alone.
    """

    prepare: Prepare
    copies: int = 3
    compiled: bool = False
    host: bool = False


PARTS: dict[str, Part] = {
    "get": Part(heaps.get, 6),
    "put": Part(heaps.put, 7),
    "accumulate": Part(sharded.accumulate, 12),
    "publish": Part(sharded.publish, 10),
    "publish-cast": Part(sharded.publish_cast, 14),
    "signal": Part(heaps.signal),
    "gather": Part(sharded.gather, 8),
    "push": Part(sharded.push, 8),
    "minibatch": Part(sharded.minibatch, 6),
    "exchange": Part(exchanges.exchange, 24, host=True),
    "planners": Part(plans.planners),
    "accumulate-kernel": Part(sharded.accumulate_kernel, 12, compiled=True),
    "publish-kernel": Part(sharded.publish_kernel, 10, compiled=True),
    "gather-kernel": Part(sharded.gather_kernel, 8, compiled=True),
}
_SIZELESS = {"signal": (64,), "planners": SAMPLES}


@dataclass(frozen=True)
class Effort:
    """How many rounds: as many as move `nbytes`, within bounds."""

    nbytes: int = 1 << 30
    least: int = 5
    most: int = 50
    warm: int = 2

    def rounds(self, nbytes: int) -> int:
        """For actions of `nbytes`."""
        return max(self.least, min(self.most, self.nbytes // max(1, nbytes)))


THOROUGH = Effort()
QUICK = Effort(nbytes=64 << 20, least=3, most=10, warm=1)


def fitting_ranks(device: str) -> list[int]:
    """2, 4, 8 ranks, as far as each has a core (on the CPU) or a device of its own; at least 2. One device: 2 and 4."""
    if device == "cuda" and torch.cuda.device_count() == 1:
        return [2, 4]
    room = torch.cuda.device_count() if device == "cuda" else len(os.sched_getaffinity(0))
    return [2, *(world for world in (4, 8) if world <= room)]


def parts_of(device: str) -> list[str]:
    """Names of what can be measured on `device` here."""
    compiled = device == "cuda" and heaps.triton_is_here()
    fitting = {
        name: (compiled or not part.compiled) and not (part.host and device != "cpu") for name, part in PARTS.items()
    }
    return [name for name, fits in fitting.items() if fits]


def run(
    parts: Iterable[str],
    worlds: Iterable[int],
    sizes: Sequence[int],
    device: str,
    effort: Effort = Effort(),
    say: Callable[[str], object] = str,
) -> dict[str, Any]:
    """Measure; returns what is saved as JSON.

    Args:
        parts: names of `PARTS`.
        worlds: numbers of ranks; rank 0 is this process, on CUDA a new one for each.
        sizes: in bytes.
        device: "cpu" or "cuda".
        effort: how many rounds.
        say: told what comes next; on CUDA a module-level function.
    """
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    chosen = list(parts)
    for name in chosen:
        if name not in PARTS:
            raise ConfigError(f"only: {name} is none of {', '.join(PARTS)}")
        if PARTS[name].compiled and not (device == "cuda" and heaps.triton_is_here()):
            raise ConfigError(f"only: {name} needs a CUDA device and triton (pip install 'odc-fsdp[kernels]')")
        if PARTS[name].host and device != "cpu":
            raise ConfigError(f"only: {name} is measured on the CPU (--device cpu)")
    if "planners" in chosen:
        rows += _planned(effort, say)
    for world in worlds if set(chosen) - {"planners"} else ():
        each = apart if device == "cuda" else here
        made, missing = each(_measured, [n for n in chosen if n != "planners"], world, sizes, device, effort, say)
        rows, left_out = rows + made, left_out + missing
    if device == "cuda" and any(world > torch.cuda.device_count() for world in worlds):
        left_out.append("NCCL and symmetric-memory collectives: ranks share a device")
    return {"schema": SCHEMA, **facts(), "device": device, "left_out": left_out, "rows": rows}


def _measured(
    parts: Sequence[str], world: int, sizes: Sequence[int], device: str, effort: Effort, say: Callable[[str], object]
) -> tuple[list[dict[str, Any]], list[str]]:
    """(rows, what was left out and why) of one number of ranks."""
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    with Crew(world, _TIMEOUT_S, device) as crew:
        for name in parts:
            for size in _SIZELESS.get(name, sizes):
                missing = _lacking(PARTS[name], size, world, device)
                if missing:
                    left_out.append(f"{name} of {text_of(size)}, {world} ranks: {missing}")
                    continue
                say(f"{name}, {world} ranks" + ("" if name in _SIZELESS else f", {text_of(size)}"))
                prepare, rounds = PARTS[name].prepare, effort.rounds(size)
                timed = slowest(crew.each(measure, prepare, size, device, rounds, effort.warm))
                crew.each(drop)
                rows += _rows(name, timed, world, None if name in _SIZELESS else size, rounds, device)
    return rows, left_out


def _planned(effort: Effort, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """Planning needs no ranks."""
    rows = []
    for samples in SAMPLES:
        say(f"planners, {samples} samples")
        with Crew(1, _TIMEOUT_S) as crew:
            timed = slowest(crew.each(measure, plans.planners, samples, "cpu", effort.least, 1))
        for row in _rows("planners", timed, samples // plans.SAMPLES_A_RANK, None, effort.least, "cpu"):
            rows.append(row | {"what": f"{row['what']}, {samples} samples"})
    return rows


def _lacking(part: Part, size: int, world: int, device: str) -> str:
    needed, free = part.copies * size * world, free_memory().nbytes
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
        needed = part.copies * size * -(-world // torch.cuda.device_count())
    return f"needs about {needed / MIB:.0f} MiB, {free / MIB:.0f} MiB are free" if needed > free * 0.9 else ""


def _rows(
    part: str, timed: Sequence[Timed], ranks: int, size: int | None, rounds: int, device: str
) -> list[dict[str, Any]]:
    """`size` is what was asked for; `nbytes` what moved, which padding and a unit's shape make a little less."""
    by_name = {each.name: each for each in timed}
    return [
        {
            "part": part,
            "what": each.name + (", Triton kernel" if PARTS[part].compiled else ""),
            "device": device,
            "ranks": ranks,
            "size": size,
            "nbytes": each.nbytes,
            "rounds": rounds,
            "seconds": spread(each.seconds),
            "rivals": {name: spread(by_name[name].seconds) for name in each.against},
        }
        for each in timed
        if each.against
    ]


def text_of(nbytes: int) -> str:
    """64 KiB, 16 MiB."""
    size, unit = (nbytes / MIB, "MiB") if nbytes >= MIB else (nbytes / KIB, "KiB")
    return f"{size:.3g} {unit}"


def show(result: dict[str, Any]) -> str:
    """The table. "against" says how many times as fast as each rival it is; over 1 is faster."""
    lines = []
    for row in result["rows"]:
        took = row["seconds"]["median"]
        rivals = ", ".join(f"{name} {rival['median'] / took:.3g}x" for name, rival in row["rivals"].items())
        lines.append(
            {
                "what": row["what"],
                "ranks": row["ranks"],
                "size": text_of(row["size"]) if row["size"] else "",
                "ms": took * 1e3,
                "GB/s": row["nbytes"] / took / 1e9 if row["nbytes"] else "",
                "against": rivals,
            }
        )
    notes = "".join(f"\nleft out: {reason}" for reason in result["left_out"])
    where = ", ".join(f"{key} {value}" for key, value in {**result["machine"], **result["versions"]}.items())
    return f"{where}\n\n{table(lines)}{notes}"


def to_stderr(text: str) -> None:
    """Progress of the command."""
    print(f"odc bench: {text}", file=sys.stderr, flush=True)
