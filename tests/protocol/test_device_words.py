"""Words of members on a device that does its work late (see `support.deferred`): each waits for what it announces."""

from __future__ import annotations

import pytest
import torch
from support.deferred import DeferredLanes, late_heaps, push
from support.members import BF16, F32, HeapGroup, gradients, room

from odc.protocol import HostRoute, Outcome, Word
from odc.settings import ACCUMULATE_MODES, Settings

TWO_UNITS = [[("w", 3000, F32), ("b", 7, BF16)], [("v", 5, F32)]]


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> list[DeferredLanes]:
    return late_heaps(monkeypatch)


def fetched(group: HeapGroup, member: int, index: int, lanes: DeferredLanes) -> set[float]:
    unit = group.units[index]
    into = room(unit, 2)
    with lanes.lane("fetch"):
        group.members[member].shards.fetch(unit, into)
        mark = lanes.mark()
    assert {v for one in into for v in one.tolist()} == {-1.0}, "the device is late"
    lanes.follow(mark)
    lanes.settle()
    return {v for one in into for v in one.tolist()}


@pytest.mark.parametrize("accumulate", ACCUMULATE_MODES)
def test_minibatches_are_right_however_late_the_device_is(deferred: list[DeferredLanes], accumulate: str) -> None:
    settings = Settings(timeout_s=60.0, accumulate=accumulate, staging_block_bytes=4096)
    with HeapGroup(TWO_UNITS, 2, settings=settings) as group:
        for epoch in (1, 2, 3):
            group.publish_all(float(epoch))
            for member in (0, 1):
                for index in (0, 1):
                    assert fetched(group, member, index, deferred[member]) == {float(epoch)}
            for member in (0, 1):
                for unit in group.units:
                    push(group, deferred[member], member, unit.index, gradients(unit, 2, 1.0 + member))
            for endpoint in group.members:
                endpoint.done(Outcome.TRAINED)
            for member, endpoint in enumerate(group.members):
                endpoint.protocol.await_done(epoch)
                endpoint.protocol.await_accumulated()
                for unit in group.units:
                    total = group.layouts[member].peer(member).accumulator(unit)
                    assert set(total.tolist()) == {3.0}, (accumulate, epoch, member)


def test_a_word_of_publishing_comes_after_the_shards(deferred: list[DeferredLanes]) -> None:
    with HeapGroup(TWO_UNITS, 2) as group:
        group.publish(0, 5.0)
        layout = group.layouts[1]
        assert layout.peer(0).board.load(Word.PUBLISHED) == 1
        assert set(layout.peer(0).published(group.units[0], 0).tolist()) == {5.0}


def test_done_comes_after_own_reads(deferred: list[DeferredLanes]) -> None:
    """A peer that sees DONE writes over what was to be read."""
    with HeapGroup(TWO_UNITS, 2) as group:
        group.publish_all(1.0)
        unit = group.units[1]
        into = [torch.zeros(10)]
        with deferred[0].lane("fetch"):
            group.members[0].shards.fetch(unit, into)
        group.members[0].done(Outcome.EVALUATED)
        assert group.layouts[1].peer(0).board.load(Word.DONE) == 1
        assert set(into[0].tolist()) == {1.0}


def test_several_blocks_share_one_wait(deferred: list[DeferredLanes]) -> None:
    settings = Settings(timeout_s=60.0, staging_block_bytes=4096)
    with HeapGroup([[("w", 8 * 1024, F32)]], 2, settings=settings, by_hand=True) as group:
        group.publish_all()
        before = deferred[0].settled
        push(group, deferred[0], 0, 0, gradients(group.units[0], 2, 1.0))
        blocks = group.layouts[1].peer(1).sent.load(0)
        assert blocks == 8, "eight blocks of 4 KiB went to the peer"
        assert group.notified == [1], "who was notified once"
        assert deferred[0].settled - before == 2, "for the gradients; for the blocks and the own chunk"
        group.drain(1)
        total = group.layouts[1].peer(1).accumulator(group.units[0])
        assert set(total.tolist()) == {1.0}


def test_an_abandoned_epoch_leaves_nothing_to_be_added_in_the_next(
    deferred: list[DeferredLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push that is cut short has asked for adds to this rank's own sums, before it would have waited for them."""
    with HeapGroup([[("w", 4096, F32)]], 2, settings=Settings(timeout_s=60.0)) as group:
        group.publish_all()
        pusher, unit, mover = group.members[0].pusher, group.units[0], group.layouts[0].mover
        with monkeypatch.context() as broken, deferred[0].lane("push"):
            asked = mover.add_part  # type: ignore[attr-defined]
            broken.setattr(mover, "add_part", lambda *args: asked(*args) or 1 / 0, raising=False)
            with pytest.raises(ZeroDivisionError):
                pusher.push(unit, gradients(unit, 2, 8.0))
        group.members[0].done(Outcome.ABANDONED, "cut short")
        group.members[1].done(Outcome.TRAINED)
        group.publish_all()
        push(group, deferred[0], 0, 0, gradients(unit, 2, 1.0))
        group.members[0].done(Outcome.TRAINED)
        assert set(group.layouts[0].mine.accumulator(unit).tolist()) == {1.0}


def test_an_abandoned_epoch_leaves_no_block_for_the_next(
    deferred: list[DeferredLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push that is cut short has filled slots without announcing them; the next push would announce them too."""
    settings = Settings(timeout_s=60.0, staging_block_bytes=4096)
    with HeapGroup([[("w", 4096, F32)]], 2, settings=settings) as group:
        group.publish_all()
        unit = group.units[0]
        with monkeypatch.context() as broken, deferred[0].lane("push"):
            broken.setattr(HostRoute, "announce", lambda route: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                group.members[0].pusher.push(unit, gradients(unit, 2, 8.0))
        group.members[0].done(Outcome.ABANDONED, "cut short")
        group.members[1].done(Outcome.TRAINED)
        group.members[1].protocol.await_accumulated()
        group.publish_all()
        push(group, deferred[0], 0, 0, gradients(unit, 2, 1.0))
        group.members[0].done(Outcome.TRAINED)
        group.members[1].protocol.await_accumulated()
        assert set(group.layouts[1].peer(1).accumulator(unit).tolist()) == {1.0}
