"""Every verb of a member waits for what it needs, names the rank that it waits for, and ends with the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from support.members import BF16, F32, HeapGroup, gradients, room
from support.spread import Spread

from odc.errors import PeerLostError
from odc.protocol import MemberProtocol, Outbox, Outcome, Word
from odc.protocol.peers.local import PushedWords
from odc.settings import ACCUMULATE_MODES, Accumulate, Settings
from odc.trace import WAIT, recorder

LAYOUT = [[("w", 4, F32), ("b", 1, BF16)], [("v", 3, F32)]]
SHORT = Settings(timeout_s=0.1)


@pytest.fixture
def group() -> Iterator[HeapGroup]:
    with HeapGroup(LAYOUT, 3, settings=SHORT) as group:
        group.attach()
        yield group


@pytest.fixture
def protocol(group: HeapGroup) -> MemberProtocol:
    return group.members[0].protocol


# publish and fetch ---------------------------------------------------------------------------------------------------


def test_publish_casts_to_the_compute_dtype_and_then_opens_the_epoch(group: HeapGroup) -> None:
    endpoint, layout = group.members[0], group.layouts[1]
    third = torch.tensor([1 / 3])
    endpoint.shards.publish([[torch.arange(4.0), third], [torch.tensor([5.0, 6.0, 7.0])]], [False, False])
    assert layout.peer(0).published(group.units[0], 0).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert torch.equal(layout.peer(0).published(group.units[0], 1), third.to(BF16))
    assert layout.peer(0).published(group.units[1], 0).tolist() == [5.0, 6.0, 7.0]
    assert endpoint.protocol.epoch == layout.peer(0).board.load(Word.PUBLISHED) == 1


def test_an_epoch_is_published_again_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the checks as well: its PUBLISHING is stored once."""

    def interrupted(units: object) -> None:
        raise KeyboardInterrupt

    with HeapGroup(LAYOUT, 2, settings=Settings(check_protocol=True)) as group:
        endpoint = group.members[0]
        shards = [[torch.ones(p.numel) for p in unit.params] for unit in group.units]
        with monkeypatch.context() as patch:
            patch.setattr(group.layouts[0], "clear", interrupted)
            with pytest.raises(KeyboardInterrupt):
                endpoint.shards.publish(shards, [False, False])
        assert endpoint.protocol.board.load(Word.PUBLISHING) == 1
        endpoint.shards.publish(shards, [False, False])
        assert endpoint.protocol.board.load(Word.PUBLISHED) == 1


@pytest.mark.parametrize("accumulate", ACCUMULATE_MODES)
def test_publish_zeroes_the_accumulators_that_were_used(accumulate: Accumulate) -> None:
    with HeapGroup(LAYOUT, 2, settings=Settings(accumulate=accumulate)) as group:
        layout = group.layouts[0]
        for unit in group.units:
            layout.peer(0).accumulator(unit).fill_(1.0)
        shards = [[torch.zeros(p.numel) for p in unit.params] for unit in group.units]
        group.members[0].shards.publish(shards, [False, True])
        assert layout.peer(0).accumulator(group.units[0]).all(), "not dirty, not written"
        assert not layout.peer(0).accumulator(group.units[1]).any()


def test_fetch_brings_every_shard_to_its_place(group: HeapGroup) -> None:
    for member in range(3):
        group.publish(member, 10.0 + member)
    into = room(group.units[0], 3)
    nbytes = group.members[1].shards.fetch(group.units[0], into)
    assert into[0].tolist() == [10.0] * 4 + [11.0] * 4 + [12.0] * 4
    assert into[1].tolist() == [10.0, 11.0, 12.0]
    assert nbytes == 2 * group.units[0].published_bytes
    group.members[1].shards.fetch(group.units[1], room(group.units[1], 3))
    both = 2 * (group.units[0].published_bytes + group.units[1].published_bytes)
    assert group.layouts[0].peer(1).board.load(Word.FETCHED) == both


def test_with_hybrid_sharding_fetches_stay_in_the_replica() -> None:
    with HeapGroup(LAYOUT, 2, replicas=2, settings=SHORT) as group:
        group.publish(2, 5.0)
        group.publish(3, 6.0)
        into = room(group.units[1], 2)
        group.members[3].shards.fetch(group.units[1], into)
        assert into[0].tolist() == [5.0] * 3 + [6.0] * 3


def test_fetch_waits_for_each_owner_to_open_each_epoch(group: HeapGroup, protocol: MemberProtocol) -> None:
    for epoch in (1, 2, 3):
        group.publish(0, epoch)
        group.publish(1, epoch)
        protocol.await_published((1,))  # what is known of one epoch says nothing of the next
        with group.late(rf"rank 10 \(epoch {epoch}\), waiting for rank 16 to publish epoch {epoch}"):
            group.members[0].shards.fetch(group.units[0], room(group.units[0], 3))
        group.publish(2, epoch)
        into = room(group.units[1], 3)
        group.members[0].shards.fetch(group.units[1], into)
        assert into[0].tolist() == [epoch] * 9


def test_what_is_known_of_an_epoch_is_not_loaded_again(group: HeapGroup, protocol: MemberProtocol) -> None:
    """A fetch asks for every unit and owner: the second time must cost next to nothing."""
    group.publish_all()
    protocol.await_published((1,))
    group.layouts[1].peer(1).board.store(Word.PUBLISHED, 0)
    protocol.await_published((1, 2))


# push, done and wait -------------------------------------------------------------------------------------------------


def test_push_waits_for_the_owner_to_open_the_epoch(group: HeapGroup) -> None:
    """Else it would add to sums that are zeroed afterwards."""
    group.publish(0)
    with group.late("waiting for rank 13 to publish epoch 1"):
        group.push(0)
    assert not group.layouts[1].peer(1).accumulator(group.units[0]).any()


def test_push_counts_bytes_that_left(group: HeapGroup) -> None:
    group.publish_all()
    sent = group.push(2)
    assert sent == 2 * (4 * 4 + 2)
    assert group.layouts[0].peer(2).board.load(Word.PUSHED) == sent


def test_a_free_slot_is_not_waited_for_and_a_full_ring_names_its_owner() -> None:
    with HeapGroup(LAYOUT, 2, settings=SHORT, by_hand=True) as group:
        group.attach()
        group.publish_all()
        protocol = group.members[0].protocol
        box = Outbox(protocol.layout, 1)
        protocol.await_credit(1, box.credit)
        while box.credit():
            box.post(group.units[0], 0, 1, F32)
        for full in (lambda: protocol.await_credit(1, box.credit), lambda: group.push(0)):
            with group.late(r"waiting for a free staging slot of rank 13 \(its server"):
                full()
        group.services[1].drain()
        protocol.await_credit(1, box.credit)


def test_waits_of_the_sender_are_recorded_on_its_lane() -> None:
    with HeapGroup([[("w", 4, F32)]], 3, settings=SHORT, by_hand=True) as group:
        group.publish(0)
        recorder().clear()
        with group.late():
            group.push(0)
        group.publish(1)
        group.publish(2)
        with group.late("staging slot"):
            for _ in range(group.layouts[0].ring.slots + 1):
                group.push(0)
        waits = [(span.peer, span.lane) for span in recorder().spans() if span.category == WAIT]
        assert waits == [(13, "push"), (13, "push")]


def test_done_gives_every_member_the_counts_of_each_parameter(group: HeapGroup) -> None:
    group.publish_all()
    endpoint, (first, second) = group.members[1], group.units
    endpoint.pusher.push(first, gradients(first, 3))
    endpoint.pusher.push(first, gradients(first, 3)[1:])
    endpoint.pusher.push(second, [])
    for member in range(3):
        assert not group.layouts[member].peer(member).pushes(1).any(), "counts are for after the push"
    endpoint.done(Outcome.TRAINED)
    for member in range(3):
        assert group.layouts[member].peer(member).pushes(1).tolist() == [1, 2, 0]
        assert not group.layouts[member].peer(member).pushes(0).any()
        assert not group.layouts[member].peer(member).pushes(2).any()
    assert group.layouts[0].peer(1).board.load(Word.DONE) == 1


def test_counts_wait_until_the_other_replica_has_read_the_last_ones() -> None:
    """A push reaches its own replica alone, its counts reach all: a slow rank must have read those of epoch 1."""
    with HeapGroup(LAYOUT, 1, replicas=2, settings=SHORT) as group:
        group.publish_all()
        group.push(0, unit=1)
        group.members[0].done(Outcome.TRAINED)
        group.publish(0)
        group.push(0, unit=1)
        with group.late("rank 13 to publish epoch 2"):
            group.members[0].done(Outcome.TRAINED)
        assert group.layouts[1].peer(1).pushes(0).tolist() == [0, 0, 1]
        assert group.layouts[1].peer(0).board.load(Word.DONE) == 1, "not done before the counts are out"
        group.publish(1)
        group.members[0].done(Outcome.TRAINED)
        assert group.layouts[1].peer(1).pushes(0).tolist() == [0, 0, 2]


def test_a_rank_that_pushed_nothing_is_done_without_waiting(group: HeapGroup) -> None:
    group.publish(0)
    group.members[0].done(Outcome.TRAINED)
    assert group.layouts[1].peer(0).board.load(Word.DONE) == 1
    group.publish(1)
    assert group.members[1].protocol.closed_as(Outcome.TRAINED) == [0]
    assert group.members[1].protocol.closed_as(Outcome.EVALUATED) == []


def test_an_epoch_of_evaluation_is_marked_as_such(group: HeapGroup) -> None:
    group.publish(0)
    group.members[0].done(Outcome.EVALUATED)
    board = group.layouts[1].peer(0).board
    assert [board.load(w) for w in (Word.DONE, Word.COMPLETE, Word.READ)] == [1, 1, 1]
    group.publish(1)
    assert group.members[1].protocol.closed_as(Outcome.EVALUATED) == [0]


def test_an_outcome_is_still_there_when_its_rank_has_closed_one_more_epoch(group: HeapGroup) -> None:
    """A fast rank may close the next epoch before a slow one has read the outcome of the last."""
    group.publish_all()
    group.members[0].done(Outcome.ABANDONED, "no memory for sample 7")
    for slow in (1, 2):
        group.members[slow].done(Outcome.TRAINED)
    group.publish(0)
    group.members[0].done(Outcome.EVALUATED)
    assert group.members[1].protocol.closed_as(Outcome.ABANDONED) == [0]
    assert group.members[1].protocol.closed_as(Outcome.EVALUATED) == []
    assert group.members[1].protocol.abandonment(0) == "no memory for sample 7"
    group.publish(0)
    group.members[0].done(Outcome.ABANDONED, "again, in a long sentence: " + "word " * 1000)
    assert group.members[0].protocol.abandonment(0).startswith("again, in a long sentence: word ")


def test_await_done_needs_every_member_and_names_one_that_is_missing(group: HeapGroup) -> None:
    group.publish_all()
    group.members[0].done(Outcome.TRAINED)
    group.members[1].done(Outcome.TRAINED)
    with group.late("waiting for rank 16 to finish epoch 1"):
        group.members[0].protocol.await_done(1)
    group.members[2].done(Outcome.TRAINED)
    group.members[0].protocol.await_done(1)


def test_the_next_epoch_waits_until_the_replicas_have_read_the_sums() -> None:
    with HeapGroup(LAYOUT, 1, replicas=2, settings=SHORT) as group:
        protocol = group.members[0].protocol
        protocol.await_end_of_epoch()  # there was none
        group.publish_all()
        for member in group.members:
            member.done(Outcome.TRAINED)
        with group.late("waiting for rank 13 to read the accumulators of epoch 1"):
            protocol.await_end_of_epoch()
        group.members[1].protocol.read_all()
        protocol.await_end_of_epoch()


def test_await_accumulated_needs_every_block_that_was_posted() -> None:
    with HeapGroup(LAYOUT, 2, settings=SHORT, by_hand=True) as group:
        for epoch in (1, 2):
            group.publish_all()
            group.push(0)
            with group.late("this rank's server to add what rank 10 pushed"):
                group.members[1].protocol.await_accumulated()
            group.drain(1)
            group.members[1].protocol.await_accumulated()
            group.members[0].protocol.await_accumulated()
            assert group.layouts[1].peer(1).accumulator(group.units[0]).tolist() == [1.0] * 5, f"epoch {epoch}"


def test_a_rank_that_sleeps_on_a_word_is_woken_by_that_word_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    spread, woken = Spread(), list[int]()
    try:
        monkeypatch.setattr(PushedWords, "wake", lambda self, index: woken.append(index))
        protocol = spread.group.members[0].protocol
        spread.group.publish(0)
        for store, word in (
            (lambda: protocol.close(Outcome.TRAINED), Word.DONE),
            (lambda: protocol.complete(wait=False), Word.COMPLETE),
            (protocol.end_reducing, Word.REDUCED),
            (protocol.read_all, Word.READ),
        ):
            store()
            assert woken[-1] == word
        assert woken[0] == Word.PUBLISHED
        many = len(woken)
        protocol.touch("testing")
        protocol.count(Word.PUSHED, 5)
        assert len(woken) == many
    finally:
        spread.close()


# abort ---------------------------------------------------------------------------------------------------------------


def test_an_abort_reaches_every_member_and_stops_every_verb(group: HeapGroup) -> None:
    group.publish_all()
    group.members[2].protocol.abort("rank 16 has no more milk", 16)
    unit = group.units[0]
    calls: list[Callable[[], object]] = [
        lambda: group.members[0].protocol.touch("working"),
        lambda: group.members[0].shards.fetch(unit, room(unit, 3)),
        lambda: group.push(0),
        lambda: group.members[1].protocol.await_done(0),
        lambda: group.members[1].protocol.await_published((0,)),
        lambda: group.members[1].protocol.await_accumulated(),
        lambda: group.members[2].protocol.touch("working"),
    ]
    for call in calls:
        with pytest.raises(PeerLostError, match="aborted by rank 16: rank 16 has no more milk"):
            call()
    group.members[1].protocol.abort("the second", 10)
    for member, layout in enumerate(group.layouts):
        assert layout.peer(member).reason == "rank 16 has no more milk", "the first reason stays"
        assert layout.peer(member).board.load(Word.ABORT) == 1 + 16


def test_a_reason_may_hold_any_text_and_a_closed_heap_takes_none(group: HeapGroup) -> None:
    group.layouts[2].close()
    group.members[2].protocol.abort("too late", 13)
    group.members[0].protocol.abort("é" * 2000, 10)
    reason = group.layouts[1].peer(0).reason
    assert reason.startswith("é" * 500)
    assert len(reason.encode()) <= 1026


def test_touch_is_progress(group: HeapGroup) -> None:
    before = group.layouts[1].peer(0).board.load(Word.PROGRESS)
    group.members[0].protocol.touch("working")
    assert group.layouts[1].peer(0).board.load(Word.PROGRESS) == before + 1
