"""A rank's membership in the job of one root, where it cannot be had."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.leaks import memfd_inodes
from support.members import F32, gradients, member_of_pool
from support.on_ranks import on_ranks
from support.waiting import until

from odc.errors import OdcError, UnsupportedError
from odc.protocol import Word
from odc.runtime import member
from odc.settings import Settings


def memory_files() -> int:
    """How many of them this process has open."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(one).startswith("/memfd:")
    return found


@on_ranks(1)
def test_a_member_that_cannot_be_made_gives_its_memory_back(rank: int, world: int) -> None:
    before, layout = memory_files(), [[("w", 8, F32)]]
    with (
        mock.patch.object(member, "Service", side_effect=UnsupportedError("it cannot listen there")),
        pytest.raises(UnsupportedError, match="it cannot listen there"),
        member_of_pool(rank, world, "1.abc", layout, Settings()),
    ):
        raise AssertionError("it was made")
    assert memory_files() == before
    with member_of_pool(rank, world, "2.abc", layout, Settings()):
        assert memory_files() > before


@on_ranks(1)
def test_a_call_into_one_root_is_progress_in_all(rank: int, world: int) -> None:
    """A rank that waits for this one in the first must not give it up while it computes with the second."""
    layout = [[("w", 8, F32)]]
    with member_of_pool(rank, world, "3.abc", layout, Settings()) as first:
        with member_of_pool(rank, world, "4.abc", layout, Settings()) as second:
            before = first.protocol.board.load(Word.PROGRESS)
            second.protocol.touch("beginning a forward")
            assert first.protocol.board.load(Word.PROGRESS) == before + 1
        first.protocol.touch("after the second has ended")


@on_ranks(2)
def test_a_member_that_has_left_maps_no_peer(rank: int, world: int) -> None:
    """Though it is not deleted, as where a model that has let go of it is still computed with."""
    before, settings = memfd_inodes(), Settings()
    with member_of_pool(rank, world, "5.abc", [[("w", 8, F32)]], settings) as left:
        (unit,) = left.layout.units
        left.shards.publish([[torch.zeros(8)]], [False])
        left.pusher.push(unit, gradients(unit, world))
        mapped = memfd_inodes() - before
        assert len(mapped) == world
    until(lambda: len(mapped & memfd_inodes()) == 1, lambda: f"the end of {mapped & memfd_inodes()}")
    left.protocol.waiter.check("a thread that it had")  # its own words stay for as long as any thread may look
    with pytest.raises(OdcError, match="the heap is closed"):
        left.pusher.push(unit, gradients(unit, world))
