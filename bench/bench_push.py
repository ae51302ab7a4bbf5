"""Push, from the call until the owner has ACCUMULATED it, against a local `add_` of the same gradient.

This process pushes, and its child owns the unit, idle but for its daemon. "local add_" adds the same gradient of fp32
into a private tensor on one thread. "gloo" is a reduce-scatter in fp32, with both ranks in lockstep. Rounds alternate.
Targets: server >= 0.45, direct >= 0.7 of the local `add_`. `bench.order` measures other ways to accumulate.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest
import torch

from bench.turns import OWNER, Push, build_all, in_turns
from odc import Settings
from odc.bench import baselines
from odc.bench.ranks import RankPool, held
from odc.bench.units import MIB, drop

_BYTES = 1 << 30  # to push in all of one case's rounds, within the bounds below
_LEAST, _MOST, _GLOO = 15, 150, 7  # rounds
MODES = {"server": Settings(), "direct": Settings(accumulate="direct")}


def accumulated(mode: str) -> tuple[float, float]:
    """Smallest and largest element of this rank's accumulator."""
    from odc.fsdp import root_of

    layout = root_of(held.modules[mode]).layout
    total = layout.mine.accumulator(layout.units[0])
    return float(total.min()), float(total.max())


def reduce_scatters(nbytes: int) -> float:
    """Median seconds of reduce-scatters in which `nbytes` of fp32 leave this rank."""
    (gloo,) = baselines.reduce_scatter(nbytes, "cpu")
    return median(in_turns({"gloo": gloo.run}, _GLOO)["gloo"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mib", [1, 4, 16, 64])
def test_push(mode: str, mib: int, pool: RankPool, note: Callable[..., None]) -> None:
    pool.each(build_all, mib * MIB, {mode: MODES[mode]})
    push = Push(mode, torch.float32)
    numel = push.unit.numel
    total, gradient, rounds = torch.zeros(numel), torch.ones(numel), min(_MOST, max(_LEAST, _BYTES // (numel * 4)))
    times = in_turns({"add": lambda: total.add_(gradient), "push": push}, rounds)
    pushes = float(total[0])
    assert pool.others(accumulated, mode) == [(pushes, pushes)], "a gradient of ones was added once a push"
    took, added = median(times["push"]), median(times["add"])
    note(
        accumulate=mode,
        chunk_MiB=mib,
        dtype="float32",
        push_ms=took * 1e3,
        local_add_ms=added * 1e3,
        ratio=added / took,
        push_GBps=numel * 4 / took / 1e9,
        gloo_ms=pool.each(reduce_scatters, numel * 4)[OWNER] * 1e3,
        slots=push.layout.ring.slots,
    )
    pool.each(drop)
