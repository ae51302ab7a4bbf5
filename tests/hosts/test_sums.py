"""Sums that leave a host while others still push: members of two hosts in one process, and an engine that copies."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.deferred import late_heaps
from support.linked import HOSTS
from support.members import BF16, HeapGroup
from support.spread import LAYOUT, Spread

from odc.errors import PeerLostError, UnsupportedError
from odc.protocol import Word
from odc.protocol.reduction import RoundedSum
from odc.settings import Accumulate, Settings


def notify(spread: Spread) -> None:
    """Do what the daemons do when they are notified."""
    for sums in spread.sums:
        sums.announce()


def bring(spread: Spread, me: int = 0) -> None:
    """Do what the daemon of `me` does with the messages of sums that have come."""
    grid = spread.group.layouts[me].grid
    for member, epoch, counts in spread.summed:
        if member in grid.partners:
            spread.readers[me].note_summed(member, epoch, counts)


def values(spread: Spread, me: int, unit: int) -> list[float]:
    one, found = spread.group.units[unit], list[torch.Tensor]()
    for part in spread.group.members[me].reduction.parts(one):
        found.append(torch.zeros(one.numel) if isinstance(part, RoundedSum) else part)
        if isinstance(part, RoundedSum):
            part.add_to(found[-1], found[-1])
    assert all(bool((part == part[0]).all()) for part in found)
    return [part[0].item() for part in found]


@pytest.mark.parametrize("accumulate", ["server", "direct"])
def test_at_the_end_what_has_not_crossed_does_once(accumulate: Accumulate) -> None:
    spread = Spread(accumulate)
    for epoch in (1, 2):
        spread.publish()
        for me in range(4):
            for unit in (0, 1):
                spread.push(me, unit, 10.0**me)
        spread.finish([True, True, False])
        for me in range(4):
            spread.readers[me].gather([True, True, False])
            for unit in (0, 1):
                assert values(spread, me, unit) == [11.0, 1100.0]
        assert sum(len(engine.reads) for engine in spread.engines) == epoch * 4, "units side by side are read together"
    spread.close()


def test_a_unit_may_leave_when_all_ranks_of_the_host_have_had_their_last_push(spread: Spread) -> None:
    spread.publish()
    spread.push(2, 1, 1.0)
    spread.push(2, 1, 2.0, last=True)
    notify(spread)
    assert not spread.summed, "rank 3 may still push"
    assert not spread.group.notified, "no rank is woken in vain"
    spread.push(3, 1, 4.0, last=True)
    assert spread.group.notified == [2, 3], "both whose sums are complete"
    notify(spread)
    assert spread.summed == [(2, 1, {1: 3}), (3, 1, {1: 3})]
    notify(spread)
    assert len(spread.summed) == 2, "once an epoch"
    bring(spread)
    spread.push(2, 0, 8.0)
    spread.finish([True, True, False])
    spread.readers[0].gather([True, True, False])
    assert values(spread, 0, 1) == [0.0, 7.0]
    assert values(spread, 0, 0) == [0.0, 8.0]
    sizes = [spread.group.units[unit].accumulator_bytes for unit in (1, 0)]
    assert [nbytes for _, nbytes in spread.engines[0].reads] == [max(64, size) for size in sizes], "each once"


def test_a_rank_without_pushes_ends_all_units_and_nothing_leaves_that_was_not_pushed(spread: Spread) -> None:
    spread.publish()
    spread.group.members[3].pusher.end(spread.group.units)
    spread.push(2, 2, 1.0, last=True)
    spread.group.members[2].pusher.end(spread.group.units)
    notify(spread)
    assert spread.summed == [(2, 1, {2: 1}), (3, 1, {2: 1})]


def test_what_is_pushed_after_the_last_push_is_not_lost(spread: Spread) -> None:
    spread.publish()
    for me in (2, 3):
        spread.push(me, 0, 1.0, last=True)
    notify(spread)
    bring(spread)
    spread.await_reads(0, 1)
    spread.push(3, 0, 5.0)
    spread.finish([True, False, False])
    spread.readers[0].gather([True, False, False])
    assert values(spread, 0, 0) == [0.0, 7.0]
    assert len(spread.engines[0].reads) == 2, "the sum crosses again"


def test_the_next_epoch_begins_with_no_sums(spread: Spread) -> None:
    for _ in range(2):
        spread.publish()
        for me in (2, 3):
            spread.push(me, 0, 1.0, last=True)
        notify(spread)
        bring(spread)
        spread.finish([True, False, False])
        spread.readers[0].gather([True, False, False])
        assert values(spread, 0, 0) == [0.0, 2.0]
    assert [sent[1] for sent in spread.summed] == [1, 1, 2, 2]
    spread.readers[0].note_summed(2, 2, {1: 1})
    assert len(spread.engines[0].reads) == 2, "of an epoch that is over nothing is read"


def test_a_rank_of_an_earlier_epoch_announces_nothing_of_the_next(spread: Spread) -> None:
    spread.publish()
    for me in (2, 3):
        spread.push(me, 0, 1.0)
    spread.group.publish(2)
    spread.group.publish(3)  # both are one epoch ahead of what follows
    spread.group.layouts[2].mine.board.store(Word.PUBLISHED, 1)
    for me in (2, 3):
        spread.group.members[me].pusher.end(spread.group.units)
    spread.sums[2].announce()
    assert not spread.summed


def test_a_read_that_fails_early_is_made_again_and_raises_in_the_end(spread: Spread) -> None:
    spread.publish()
    for me in (2, 3):
        spread.push(me, 0, 1.0, last=True)
    notify(spread)
    failed = threading.Event()
    read = spread.engines[0].read

    def fails(*arguments: Any, **options: Any) -> None:
        failed.set()
        raise PeerLostError("connection reset", culprit=16)

    spread.engines[0].read = fails  # type: ignore[method-assign]
    spread.group.layouts[0].mine.board.store(Word.ABORT, 1)  # so that no thread waits for the link to explain it
    bring(spread)
    assert failed.wait(60)
    spread.group.layouts[0].mine.board.store(Word.ABORT, 0)
    spread.engines[0].read = read  # type: ignore[method-assign]
    spread.finish([True, False, False])
    spread.readers[0].gather([True, False, False])
    assert values(spread, 0, 0) == [0.0, 2.0]


def test_an_abandoned_minibatch_leaves_no_read_behind(spread: Spread) -> None:
    spread.publish()
    for me in (2, 3):
        spread.push(me, 0, 1.0, last=True)
    notify(spread)
    going, goes_on = threading.Event(), threading.Event()
    read = spread.engines[0].read

    def slow(*arguments: Any, **options: Any) -> None:
        going.set()
        assert goes_on.wait(60)
        read(*arguments, **options)

    spread.engines[0].read = slow  # type: ignore[method-assign]
    bring(spread)
    assert going.wait(60)
    spread.group.layouts[0].peer(2).board.store(Word.LEFT, 1)  # it waits for this rank's READ with all it has
    threading.Timer(0.3, goes_on.set).start()
    spread.readers[0].skip()
    assert len(spread.engines[0].reads) == 1, "it has returned while the thread was reading"


def test_sums_are_rounded_once_as_they_leave() -> None:
    spread = Spread(sums_dtype="bfloat16")
    for wrong in (False, True):
        spread.publish()
        spread.push(1, 0, 1.0)
        for me, value in ((2, 256.0), (3, 1.0), (2, 1.0), (3, 0.5)):
            spread.push(me, 0, value)
        for me in (2, 3):
            spread.push(me, 2, 1 + 2.0**-6, last=True)
        notify(spread)
        bring(spread)
        if wrong:
            spread.push(3, 2, 2.0**-6)
        spread.finish([True, False, True])
        spread.readers[0].gather([True, False, True])
        sums = [258.5, 2 + 2.0**-5 + wrong * 2.0**-6]
        for unit, whole in zip((0, 2), sums, strict=True):
            rounded = torch.tensor(whole).to(BF16).item()
            assert values(spread, 0, unit) == [float(unit == 0), rounded]
        assert sums[0] != torch.tensor(sums[0]).to(BF16).item(), "or this shows nothing"
    assert sum(spread.group.units[unit].numel for unit in (0, 2)) * 2 < 64 * 2 <= spread.engines[0].nbytes
    spread.close()


def test_a_daemon_does_not_wait_for_a_device_that_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """SUMMED is sent in a later turn, once what the device was asked for is there; COMPLETE waits for it."""
    lanes = late_heaps(monkeypatch, atomic=True)
    spread = Spread(sums_dtype="bfloat16")
    spread.publish()
    for me in (2, 3):
        with lanes[me].lane("push"):
            spread.push(me, 0, 1.0, last=True)
    for me in (2, 3):
        with lanes[me].lane("server"):
            lanes[me].ask(lambda: None)  # the device is busy
    before = lanes[2].settled
    assert spread.sums[2].announce() and not spread.summed, "the device has not rounded it yet"
    assert not spread.sums[2].announce()
    assert [(member, epoch) for member, epoch, _ in spread.summed] == [(2, 1)] and lanes[2].settled == before
    assert spread.sums[3].announce()
    before = lanes[3].settled
    spread.sums[3].complete([True, False, False])
    assert lanes[3].settled == before + 1, "the daemon's rounding is over before this rank is COMPLETE"
    assert not spread.sums[3].announce() and len(spread.summed) == 1, "what is COMPLETE is not announced any more"
    spread.close()


def test_what_cannot_be_rounded_is_refused() -> None:
    with pytest.raises(ValueError, match="would round the sums that"):
        Settings(sums_dtype="bfloat16", reproducible=True)
    with pytest.raises(ValueError, match="sums_dtype must be one of accumulator, bfloat16, int8, not 'half'"):
        Settings(sums_dtype="half")  # type: ignore[arg-type]
    settings = Settings(sums_dtype="bfloat16")
    with pytest.raises(UnsupportedError, match="is for a mesh whose shards lie on several hosts"):
        HeapGroup(LAYOUT, 2, replicas=2, hosts=HOSTS, settings=settings)
    group = HeapGroup(LAYOUT, 4, settings=settings)
    assert group.layouts[0].rounded is None, "on one host nothing crosses"
    group.close()
