"""`odc bench`: every case at every size and number of ranks, one table, one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from odc.bench import dispatching, heaps
from odc.bench.parts import PARTS, THOROUGH, Effort
from odc.bench.ranks import RankPool, alone
from odc.bench.report import facts, spread
from odc.bench.rounds import Timed, measure, slowest
from odc.bench.tables import MIB, SCHEMA, brief, text_of
from odc.bench.units import drop
from odc.errors import ConfigError
from odc.memory import free_memory
from odc.provenance import begin

_SIZELESS = {"signal": (64,), "host": (64,)}
_TIMEOUT_S = {"cpu": 600.0, "cuda": 180.0}  # a lent device is not spent on waiting for one case
_PATIENCE = 3  # failures, after which nothing more is tried
_FASTER = {"cpu": 1, "cuda": 64}  # as many times as many bytes go into the effort of a case

Case = tuple[str, int]


def fitting_ranks(device: str) -> list[int]:
    """2, 4, 8 ranks, as far as each has a core (on the CPU) or a device of its own; at least 2. One device: 2 and 4."""
    if device == "cuda" and torch.cuda.device_count() == 1:
        return [2, 4]
    room = torch.cuda.device_count() if device == "cuda" else len(os.sched_getaffinity(0))
    return [2, *(world for world in (4, 8) if world <= room)]


def parts_of(device: str, only: Iterable[str] | None = None) -> list[str]:
    """Names of what can be measured on `device` here; or `only`, and ConfigError where one of them cannot."""
    if only is None:
        return [name for name in PARTS if not unfit(name, device)]
    for name in (chosen := [*only]):
        if name not in PARTS:
            raise ConfigError(f"only: {name} is none of {', '.join(PARTS)}")
        if why := unfit(name, device):
            raise ConfigError(f"only: {why}")
    return chosen


def unfit(name: str, device: str) -> str:
    """Why a part cannot be measured on `device` here; empty where it can."""
    on = PARTS[name].on
    if on in (None, device):
        return ""
    return f"{name} is measured on the CPU (--device cpu)" if on == "cpu" else f"{name} needs a CUDA device"


def run(
    parts: Iterable[str],
    worlds: Iterable[int],
    sizes: Sequence[int],
    device: str,
    effort: Effort = THOROUGH,
    report: Callable[[str], object] = str,
) -> dict[str, Any]:
    """Measures and returns what is saved as JSON. A case that fails is named under "failed", and the others go on.

    `worlds` are numbers of ranks, `sizes` bytes. This process is rank 0, on CUDA a fresh one for each world. `report`
    gets lines of progress and must pickle.
    """
    begun, found, chosen = begin(), _Found(), parts_of(device, parts)
    if "planners" in chosen:
        found.rows += _planned(effort, report)
    for world in worlds:
        cases = [(name, size) for name in chosen if name != "planners" for size in _SIZELESS.get(name, sizes)]
        while cases:  # all in one go, unless one fails
            if len(found.failed) >= _PATIENCE:
                found.left_out.append(f"{len(cases)} cases with {world} ranks: too many others failed")
                break
            args = (world, cases, device, effort, report)
            try:
                more, cases = alone(_measured, *args) if device == "cuda" else _measured(*args)
            except BrokenExecutor:
                more, cases = _Found(failed=[f"{world} ranks: the process of rank 0 died; see its output"]), []
            found = _Found(*(mine + others for mine, others in zip(astuple(found), astuple(more), strict=True)))
    return {"schema": SCHEMA, **facts(begun), "device": device, **vars(found)}


@dataclass
class _Found:
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def _measured(
    world: int, cases: list[Case], device: str, effort: Effort, report: Callable[[str], object]
) -> tuple[_Found, list[Case]]:
    """What was found, and the cases that remain after one that failed, whose ranks cannot go on."""
    found = _Found()
    if device == "cuda" and world > torch.cuda.device_count():
        found.left_out.append(f"{world} ranks: NCCL and symmetric-memory collectives (ranks share a device)")
    left, what = list(cases), ""
    try:
        with RankPool(world, _TIMEOUT_S[device], device) as pool:
            while left:
                name, size = left.pop(0)
                what = f"{name}, {world} ranks" + ("" if name in _SIZELESS else f", {text_of(size)}")
                if missing := _lacking(name, size, world, device):
                    found.left_out.append(f"{what}: {missing}")
                    continue
                report(what)
                _case(pool, name, size, device, effort, found, report)
    except Exception as error:
        if not what:
            raise  # no pool at all
        found.failed.append(f"{what}: {type(error).__name__}: {error}")
        report(f"failed: {found.failed[-1]}")
        return found, left
    return found, []


def _case(
    pool: RankPool, name: str, size: int, device: str, effort: Effort, found: _Found, report: Callable[[str], object]
) -> None:
    rounds = effort.rounds(size // _FASTER[device])
    timed = slowest(pool.each(measure, PARTS[name].prepare(), size, device, rounds, effort.warm))
    pool.each(drop)
    found.left_out += [
        f"{each.name}, {pool.world} ranks, {text_of(size)}: {each.refused}" for each in timed if each.refused
    ]
    for row in _rows(name, timed, pool.world, None if name in _SIZELESS else size, device):
        found.rows.append(row)
        report(brief(row))


def _planned(effort: Effort, report: Callable[[str], object]) -> list[dict[str, Any]]:
    """Planning needs no ranks."""
    rows = []
    for samples in effort.planned:
        report(f"planners, {samples} samples")
        with RankPool(1, _TIMEOUT_S["cpu"]) as pool:
            timed = slowest(pool.each(measure, dispatching.planners, samples, "cpu", effort.least, 1))
        for row in _rows("planners", timed, samples // dispatching.SAMPLES_A_RANK, None, "cpu"):
            rows.append(row | {"what": f"{row['what']}, {samples} samples"})
    return rows


def _lacking(name: str, size: int, world: int, device: str) -> str:
    if name == "signal" and world < 2:
        return "needs two ranks"
    part = PARTS[name]
    needed, free = part.copies * size * world, free_memory().nbytes
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
        needed = part.copies * max(size, heaps.DEVICE_SPAN) * -(-world // torch.cuda.device_count())
    return f"needs about {needed / MIB:.0f} MiB, {free / MIB:.0f} MiB are free" if needed > free * 0.9 else ""


def _rows(part: str, timed: Sequence[Timed], ranks: int, size: int | None, device: str) -> list[dict[str, Any]]:
    """`size` is what was asked for; `nbytes` what moved, which padding and a unit's shape make a little less."""
    by_name = {each.name: each for each in timed if not each.refused}
    return [
        {
            "part": part,
            "what": each.name,
            "device": device,
            "ranks": ranks,
            "size": size,
            "nbytes": each.nbytes,
            "rounds": len(each.seconds),
            "seconds": spread(each.seconds),
            "device_seconds": spread(each.device_seconds) if each.device_seconds else None,
            "host_seconds": spread(each.host_seconds) if each.host_seconds else None,
            "limit": next((name for name in each.against if name in by_name and by_name[name].limit), None),
            "rivals": {name: spread(by_name[name].seconds) for name in each.against if name in by_name},
            "device_rivals": {
                name: spread(by_name[name].device_seconds)
                for name in each.against
                if name in by_name and by_name[name].device_seconds and each.device_seconds
            },
        }
        for each in by_name.values()
        if each.against
    ]
