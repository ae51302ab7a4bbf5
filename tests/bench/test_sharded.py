"""The copy that a fetch is measured against gets the memory that the fetch gets."""

from __future__ import annotations

import pytest
import torch

from odc.bench import sharded
from odc.bench.ranks import RankPool, held
from odc.bench.units import build
from odc.fsdp import fetcher, root_of


def opened() -> None:
    """A unit of 1 MiB whose minibatch is open."""
    build("odc", 1 << 20, torch.float32, "block")
    held.module.unshard()
    held.module.reshard()


def test_the_plain_copy_asks_for_huge_pages_as_a_fetch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    advised: dict[object, list[int]] = {fetcher: [], sharded: []}
    for module, sizes in advised.items():
        monkeypatch.setattr(module, "advise_huge", lambda buffer, sizes=sizes: sizes.append(buffer.nbytes))
    with RankPool(2) as pool:
        pool.each(opened)
        plain = sharded.PlainCopy(root_of(held.module), held.module, "cpu")
        for sizes in advised.values():
            sizes.clear()
        held.module.unshard()
        held.module.reshard()
        plain()
        plain.free()
    assert len(advised[fetcher]) == 9
    assert advised[sharded] == advised[fetcher]


def moved_by_a_push() -> dict[str, int]:
    return {one.name: one.nbytes for one in sharded.push(1 << 20, "cpu")}


def test_a_push_is_measured_against_the_reduce_scatter_of_the_same_unit() -> None:
    """A rank sends the parts of the others: of two ranks, half the unit."""
    with RankPool(2) as pool:
        for moved in pool.each(moved_by_a_push):
            assert moved["gloo reduce_scatter"] * 2 == moved["push of a unit"] >= 1 << 20
