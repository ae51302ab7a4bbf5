"""Fetch: `module.unshard()` of one unit against memcpy of the same bytes into the same destinations.

Both allocate the unsharded parameters anew, as every unshard does, with the same advice on huge pages. With pages
"kept" malloc uses freed memory again, as odc has it do; with pages "fresh" all free memory goes back to the kernel
before each fetch and each memcpy (malloc_trim), so that both fault every page in. "Bookkeeping" is the same `unshard`
without the copies: the work of torch and odc for each parameter, which FSDP2 does too. "gloo" is FSDP2's `unshard`,
with both ranks in lockstep. Rounds alternate. Target: ratio >= 0.85 for units of 1 MiB and more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from statistics import median

import pytest
import torch

from bench.turns import in_turns
from odc.bench.ranks import RankPool, held
from odc.bench.sharded import PlainCopy, opened
from odc.bench.units import MIB, build, drop
from odc.fsdp import root_of

_BYTES = 1 << 30  # to fetch in all of one case's rounds, within the bounds below
_LEAST, _MOST, _GLOO, _BARE = 15, 200, 7, 50  # rounds


def unshard_s(rounds: int) -> float:
    """Median seconds of `unshard`."""
    return median(in_turns({"unshard": held.module.unshard}, rounds, after=held.module.reshard)["unshard"])


def bookkeeping_s() -> float:
    """As `unshard_s`, with the copies left out."""
    shards = root_of(held.module).member.shards
    shards.fetch = lambda unit, destinations, lane="main": 0
    try:
        return unshard_s(_BARE)
    finally:
        del shards.fetch


def open_unit(nbytes: int) -> None:
    """A unit that peers can fetch, because its minibatch is open."""
    opened(nbytes, "cpu")


@pytest.mark.parametrize("pages", ["kept", "fresh"])
@pytest.mark.parametrize("mib", [1, 4, 16, 64])
def test_fetch(pages: str, mib: int, pool: RankPool, note: Callable[..., None]) -> None:
    pool.each(build, "fsdp2", mib * MIB, torch.float32)
    gloo = pool.each(unshard_s, _GLOO)[0]
    pool.each(open_unit, mib * MIB)
    memcpy = PlainCopy(root_of(held.module), held.module, "cpu")

    def free() -> None:
        held.module.reshard()
        memcpy.free()
        if pages == "fresh":
            ctypes.CDLL(None).malloc_trim(0)

    rounds = min(_MOST, max(_LEAST, _BYTES // memcpy.nbytes))
    times = in_turns({"memcpy": memcpy, "fetch": held.module.unshard}, rounds, after=free)
    fetch, copy = median(times["fetch"]), median(times["memcpy"])
    note(
        pages=pages,
        unit_MiB=mib,
        dtype="float32",
        parameters=9,
        fetch_ms=fetch * 1e3,
        memcpy_ms=copy * 1e3,
        ratio=copy / fetch,
        fetch_GBps=memcpy.nbytes / fetch / 1e9,
        bookkeeping_ms=bookkeeping_s() * 1e3,
        gloo_ms=gloo * 1e3,
        rounds=rounds,
    )
    pool.each(drop)
