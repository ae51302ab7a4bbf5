"""Fetch: `module.unshard()` of one unit against memcpy of the same bytes into the same destinations.

Both allocate the unsharded parameters anew, as every unshard does, with the same advice on huge pages. With pages
"kept" malloc uses freed memory again, as odc has it do; with pages "fresh" all free memory goes back to the kernel
before each fetch and each memcpy (malloc_trim), so that both fault every page in. "Bookkeeping" is the same `unshard`
without the copies: the work of torch and odc for each parameter, which FSDP2 does too. "gloo" is FSDP2's `unshard`,
with both ranks in lockstep. Rounds alternate. Target: ratio >= 0.85 for units of 1 MiB and more.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch

from odc.bench.ranks import RankPool, held
from odc.bench.sharded import PlainCopy
from odc.bench.units import MIB, Shape, build, drop
from odc.fsdp import root_of

_BYTES = 1 << 30  # to fetch in all of one case's rounds, within the bounds below
_LEAST, _MOST, _GLOO = 15, 200, 7  # rounds
PAGES = ("kept", "fresh")
CASES = [
    pytest.param(pages, mib, dtype, shape, id=f"{pages}-{mib}MiB-{str(dtype)[6:]}-{shape}")
    for pages in PAGES
    for shape, mibs in (("block", (1, 4, 16, 64)), ("one", (1, 16)))
    for mib in mibs
    for dtype in (torch.float32, torch.bfloat16)
]


def forget_freed(pages: str) -> None:
    """Gives free memory back to the kernel if `pages` are to be fresh."""
    if pages == "fresh":
        ctypes.CDLL(None).malloc_trim(0)


def build_and_open(nbytes: int, dtype: torch.dtype, shape: Shape) -> None:
    """A unit that peers can fetch, because its minibatch is open."""
    build("odc", nbytes, dtype, shape)
    unshard_and_back()


def unshard_and_back() -> float:
    """Seconds of one `unshard`; reshards afterwards."""
    begin = time.perf_counter()
    held.module.unshard()
    took = time.perf_counter() - begin
    held.module.reshard()
    return took


def unshard_times(rounds: int) -> list[float]:
    """`rounds` of `unshard_and_back`, after a warm-up of two."""
    return [unshard_and_back() for _ in range(rounds + 2)][2:]


def cold(plain: PlainCopy) -> float:
    """Seconds to allocate the destinations and copy; frees them afterwards."""
    begin = time.perf_counter()
    plain()
    took = time.perf_counter() - begin
    plain.free()
    return took


def bookkeeping(rounds: int) -> list[float]:
    """As `unshard_times`, with the copies left out."""
    shards = root_of(held.module).member.shards
    shards.fetch = lambda unit, destinations, lane="main": 0
    try:
        return unshard_times(rounds)
    finally:
        del shards.fetch


@pytest.mark.parametrize(("pages", "mib", "dtype", "shape"), CASES)
def test_fetch(
    pages: str, mib: int, dtype: torch.dtype, shape: Shape, pool: RankPool, note: Callable[..., None], benchmark: Any
) -> None:
    pool.each(build, "fsdp2", mib * MIB, dtype, shape)
    gloo = median(pool.each(unshard_times, _GLOO)[0])
    pool.each(build_and_open, mib * MIB, dtype, shape)
    memcpy = PlainCopy(root_of(held.module), held.module, "cpu")
    copies: list[float] = []

    def between() -> None:
        held.module.reshard()
        forget_freed(pages)
        copies.append(cold(memcpy))
        forget_freed(pages)

    rounds = min(_MOST, max(_LEAST, _BYTES // memcpy.nbytes))
    benchmark.pedantic(held.module.unshard, setup=between, rounds=rounds, warmup_rounds=2)
    fetch = benchmark.stats.stats.median
    held.module.reshard()
    bare = median(bookkeeping(50))
    ratio = median(copies) / fetch
    benchmark.extra_info.update(ratio=ratio, memcpy_s=median(copies), gloo_s=gloo)
    note(
        pages=pages,
        unit_MiB=mib,
        dtype=str(dtype)[6:],
        parameters=9 if shape == "block" else 1,
        fetch_ms=fetch * 1e3,
        memcpy_ms=median(copies) * 1e3,
        ratio=ratio,
        fetch_GBps=memcpy.nbytes / fetch / 1e9,
        bookkeeping_ms=bare * 1e3,
        gloo_ms=gloo * 1e3,
        rounds=rounds,
    )
    pool.each(drop)
