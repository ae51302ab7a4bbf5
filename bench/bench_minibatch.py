"""Minibatch: what begin and finish cost when there is nothing to do, and what checking for stale weights costs.

"empty" is `with model.minibatch(): pass` on every rank in lockstep, over four units of 64 KiB, beside a gloo barrier.
"stale check" is the comparison before each root forward of an open minibatch, which reads this rank's shards and their
published copies, beside a fetch of the same model, which each forward does as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from odc.bench.ranks import RankPool, held
from odc.bench.units import MIB, BenchUnit, build, drop
from odc.trace import recorder

_ROUNDS, _WARM, _STEPS = 200, 20, 60


class Layers(nn.Module):
    """Four units of 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BenchUnit(1 << 16, torch.float32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build_layers() -> None:
    """The root of four sharded units."""
    from odc import fully_shard

    drop()
    torch.manual_seed(0)
    model = Layers()
    for layer in model.layers:
        fully_shard(layer)
    held.module = fully_shard(model)


def empty_minibatch() -> None:
    """A minibatch with nothing to compute or push: only the meeting."""
    with held.module.minibatch():
        pass


def empty_minibatches(count: int) -> None:
    """Runs `count` empty minibatches."""
    for _ in range(count):
        empty_minibatch()


def barriers(count: int) -> float:
    """Median seconds of a gloo barrier."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        dist.barrier()
        times.append(time.perf_counter() - begin)
    return median(times)


@pytest.mark.parametrize("world", [2, 4])
def test_empty(world: int, note: Callable[..., None], benchmark: Any) -> None:
    with RankPool(world) as pool:
        pool.each(build_layers)
        pool.start(empty_minibatches, _ROUNDS + _WARM)
        benchmark.pedantic(empty_minibatch, rounds=_ROUNDS, warmup_rounds=_WARM)
        pool.finish()
        barrier = pool.each(barriers, _ROUNDS)[0]
    note(
        what="empty minibatch",
        ranks=world,
        model="4 x 64 KiB",
        ms=benchmark.stats.stats.median * 1e3,
        beside="gloo barrier",
        beside_ms=barrier * 1e3,
    )


@pytest.mark.parametrize("mib", [1, 16, 64])
def test_stale_check(mib: int, note: Callable[..., None], benchmark: Any) -> None:
    from odc.fsdp import root_of
    from odc.fsdp.refusals import refuse_stale

    with RankPool(2) as pool:
        pool.each(build_and_open, mib * MIB)
        root = root_of(held.module)
        shards = [[param.shard() for param in group.odc_params] for group in root.groups]
        fetches: list[float] = []

        def between() -> None:
            begin = time.perf_counter()
            held.module.unshard()
            fetches.append(time.perf_counter() - begin)
            held.module.reshard()

        benchmark.pedantic(refuse_stale, (root.layout, root.minibatch.epoch, shards), setup=between, rounds=50)
    note(
        what="stale check",
        ranks=2,
        model=f"{mib} MiB",
        ms=benchmark.stats.stats.median * 1e3,
        beside="fetch",
        beside_ms=median(fetches) * 1e3,
    )


def build_and_open(nbytes: int) -> None:
    """A unit of `nbytes` bytes whose minibatch is open."""
    build("odc", nbytes, torch.float32)
    held.module.unshard()
    held.module.reshard()


def build_linears() -> None:
    """The root of eight units of 256 KiB."""
    from odc import fully_shard

    drop()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    for layer in model:
        fully_shard(layer)
    held.module, held.batch = fully_shard(model), torch.randn(256, 256)


def steps(count: int) -> tuple[list[float], list[float], int]:
    """Seconds of `count` steps with the recorder on, of as many with it off, in turn, and the spans of a step."""
    times: dict[bool, list[float]] = {True: [], False: []}
    recorder().clear()
    for i in range(2 * count):
        recorder().enabled = i % 2 == 0
        begin = time.perf_counter()
        with held.module.minibatch():
            for _ in range(2):
                held.module(held.batch).sum().backward()
        times[recorder().enabled].append(time.perf_counter() - begin)
        held.module.zero_grad()
    recorder().enabled = True
    spans = len(recorder().spans()) // count
    recorder().clear()
    return times[True], times[False], spans


def test_recorder(note: Callable[..., None]) -> None:
    with RankPool(2) as pool:
        pool.each(build_linears)
        pool.each(steps, 5)
        on, off, spans = pool.each(steps, _STEPS)[0]
    note(
        what=f"step, recorder on ({spans} spans)",
        ranks=2,
        model="8 x 256 KiB",
        ms=median(on) * 1e3,
        beside="recorder off",
        beside_ms=median(off) * 1e3,
    )
