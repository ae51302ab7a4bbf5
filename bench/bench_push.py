"""Push, from the call until the owner has ACCUMULATED it, against a local `add_` of the same gradient.

This process pushes, and its child owns the unit, idle but for its daemon. "local add_" adds the same gradient, in its
dtype, into a private fp32 tensor on one thread (mixed dtypes in blocks, which is faster); "copy+add" copies it first,
as a push that did one thing after the other would. "gloo" is a reduce-scatter in fp32, with both ranks in lockstep.
Rounds alternate. Targets, fp32: server >= 0.45, direct >= 0.7 of the local `add_`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist

from odc import Settings
from odc.bench.ranks import RankPool, held
from odc.bench.units import MIB, build, drop

OWNER = 1
_BYTES = 1 << 30  # to push in all of one case's rounds, within the bounds below
_LEAST, _MOST, _GLOO = 15, 150, 7  # rounds
_BLOCK = 1 << 18  # elements; a mixed-dtype add is fastest over about 1 MiB of the accumulator
MODES = {
    "server": Settings(),
    "direct": Settings(accumulate="direct"),
    "reproducible": Settings(reproducible=True),
}
CASES = [
    pytest.param(mode, mib, dtype, id=f"{mode}-{mib}MiB-{str(dtype)[6:]}")
    for mode in MODES
    for mib in (1, 4, 16, 64)
    for dtype in (torch.float32, torch.bfloat16)
]


def build_and_open(chunk: int, settings: Settings) -> None:
    """A unit of two chunks of `chunk` bytes of fp32, whose minibatch is open."""
    build("odc", 2 * chunk, torch.float32, settings=settings)
    held.module.unshard()
    held.module.reshard()


def accumulated() -> tuple[float, float]:
    """Smallest and largest element of this rank's accumulator."""
    from odc.fsdp import root_of

    layout = root_of(held.module).layout
    total = layout.mine.accumulator(layout.units[0])
    return float(total.min()), float(total.max())


def reduce_scatters(numel: int, rounds: int) -> list[float]:
    """Seconds of `rounds` fp32 reduce-scatters to `numel` elements a rank, after a warm-up of two."""
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch < 2.13
    whole, part = torch.ones(2 * numel), torch.empty(numel)
    times = []
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        reduce_scatter(part, whole)
        times.append(time.perf_counter() - begin)
    return times[2:]


class Push:
    """Pushes a gradient of ones for every parameter to the owner."""

    def __init__(self, dtype: torch.dtype) -> None:
        from odc.fsdp import root_of
        from odc.protocol import Gradient

        root = root_of(held.module)
        self.member, self.layout, self.unit = root.member, root.layout, root.layout.units[0]
        self.gradients = [
            Gradient(i, torch.ones(2 * spec.numel, dtype=dtype)) for i, spec in enumerate(self.unit.params)
        ]
        self.times = 0

    def __call__(self) -> None:
        """Seconds until the owner has added all of it."""
        self.times += 1
        self.member.pusher.push_to(OWNER, self.unit, self.gradients)
        ring = self.member.protocol.ring(OWNER, 0)
        while ring.added() != ring.posted():
            time.sleep(0)


class Local:
    """What a push is measured against, in private memory."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.target, self.gradient = torch.zeros(numel), torch.ones(numel, dtype=dtype)
        self.staged = torch.ones_like(self.gradient)
        self._block = numel if dtype is torch.float32 else _BLOCK

    def add(self) -> float:
        """Seconds of a local `add_`."""
        begin = time.perf_counter()
        for start in range(0, self.target.numel(), self._block):
            self.target[start : start + self._block].add_(self.gradient[start : start + self._block])
        return time.perf_counter() - begin

    def copy_and_add(self) -> float:
        """Seconds of a copy and a local `add_`, block after block."""
        begin = time.perf_counter()
        for start in range(0, self.target.numel(), _BLOCK):
            staged = self.staged[start : start + _BLOCK].copy_(self.gradient[start : start + _BLOCK])
            self.target[start : start + _BLOCK].add_(staged)
        return time.perf_counter() - begin


@pytest.mark.parametrize(("mode", "mib", "dtype"), CASES)
def test_push(
    mode: str, mib: int, dtype: torch.dtype, pool: RankPool, note: Callable[..., None], benchmark: Any
) -> None:
    pool.each(build_and_open, mib * MIB, MODES[mode])
    push = Push(dtype)
    local = Local(push.unit.numel, dtype)
    gloo = median(pool.each(reduce_scatters, push.unit.numel, _GLOO)[0])
    adds: list[float] = []
    copies: list[float] = []

    def between() -> None:
        adds.append(local.add())
        copies.append(local.copy_and_add())

    nbytes = push.unit.numel * 4
    benchmark.pedantic(push, setup=between, rounds=min(_MOST, max(_LEAST, _BYTES // nbytes)), warmup_rounds=2)
    assert pool.others(accumulated) == [(push.times, push.times)], "a gradient of ones was added once a push"
    took = benchmark.stats.stats.median
    ratio = median(adds) / took
    benchmark.extra_info.update(ratio=ratio, add_s=median(adds), gloo_s=gloo)
    note(
        accumulate=mode,
        chunk_MiB=mib,
        dtype=str(dtype)[6:],
        push_ms=took * 1e3,
        local_add_ms=median(adds) * 1e3,
        ratio=ratio,
        copy_add_ratio=median(adds) / median(copies),
        push_GBps=push.unit.numel * dtype.itemsize / took / 1e9,
        gloo_ms=gloo * 1e3,
        slots=push.layout.ring.slots,
    )
    pool.each(drop)
