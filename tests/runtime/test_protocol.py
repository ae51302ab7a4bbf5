from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from support.members import BF16, F32, Crew

from odc.errors import PeerLostError
from odc.runtime import Gradient, Outcome, UnitSpec, Word
from odc.settings import ACCUMULATE_MODES, Accumulate, Settings

LAYOUT = [[("w", 4, F32), ("b", 1, BF16)], [("v", 3, F32)]]
SHORT = Settings(timeout_s=0.1)


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew(LAYOUT, 3, settings=SHORT) as crew:
        crew.attach()
        yield crew


def room(unit: UnitSpec, shards: int) -> list[torch.Tensor]:
    return [torch.full((shards * spec.numel,), -1.0, dtype=spec.dtype) for spec in unit.params]


def ones(unit: UnitSpec, shards: int) -> list[Gradient]:
    return [Gradient(i, torch.ones(shards * spec.numel, dtype=spec.dtype)) for i, spec in enumerate(unit.params)]


# publish and fetch ---------------------------------------------------------------------------------------------------


def test_publish_casts_to_the_compute_dtype_and_then_opens_the_epoch(crew: Crew) -> None:
    endpoint, layout = crew.members[0], crew.layouts[1]
    third = torch.tensor([1 / 3])
    endpoint.shards.publish([[torch.arange(4.0), third], [torch.tensor([5.0, 6.0, 7.0])]], [False, False])
    assert layout.peer(0).published(crew.units[0], 0).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert torch.equal(layout.peer(0).published(crew.units[0], 1), third.to(BF16))
    assert layout.peer(0).published(crew.units[1], 0).tolist() == [5.0, 6.0, 7.0]
    assert endpoint.protocol.epoch == layout.peer(0).board.load(Word.PUBLISHED) == 1


@pytest.mark.parametrize("accumulate", ACCUMULATE_MODES)
def test_publish_zeroes_the_accumulators_that_were_used(accumulate: Accumulate) -> None:
    with Crew(LAYOUT, 2, settings=Settings(accumulate=accumulate)) as crew:
        layout = crew.layouts[0]
        for unit in crew.units:
            for source in range(layout.sources):
                layout.peer(0).accumulator(unit, source).fill_(1.0)
        shards = [[torch.zeros(p.numel) for p in unit.params] for unit in crew.units]
        crew.members[0].shards.publish(shards, [False, True])
        for source in range(layout.sources):
            assert layout.peer(0).accumulator(crew.units[0], source).all(), "not dirty, not written"
            assert not layout.peer(0).accumulator(crew.units[1], source).any()


def test_fetch_brings_every_shard_to_its_place(crew: Crew) -> None:
    for member in range(3):
        crew.publish(member, 10.0 + member)
    into = room(crew.units[0], 3)
    nbytes = crew.members[1].shards.fetch(crew.units[0], into)
    assert into[0].tolist() == [10.0] * 4 + [11.0] * 4 + [12.0] * 4
    assert into[1].tolist() == [10.0, 11.0, 12.0]
    assert nbytes == 2 * crew.units[0].published_bytes
    crew.members[1].shards.fetch(crew.units[1], room(crew.units[1], 3))
    both = 2 * (crew.units[0].published_bytes + crew.units[1].published_bytes)
    assert crew.layouts[0].peer(1).board.load(Word.FETCHED) == both


def test_with_hybrid_sharding_fetches_stay_in_the_own_replica() -> None:
    with Crew(LAYOUT, 2, replicas=2, settings=SHORT) as crew:
        crew.publish(2, 5.0)
        crew.publish(3, 6.0)
        into = room(crew.units[1], 2)
        crew.members[3].shards.fetch(crew.units[1], into)
        assert into[0].tolist() == [5.0] * 3 + [6.0] * 3


def test_fetch_waits_for_the_owner_to_open_the_epoch(crew: Crew) -> None:
    crew.publish_all(1.0)
    crew.publish(0, 2.0)
    crew.publish(1, 2.0)
    with crew.late(r"rank 10 \(epoch 2\), waiting for rank 16 to publish epoch 2"):
        crew.members[0].shards.fetch(crew.units[0], room(crew.units[0], 3))
    crew.publish(2, 2.0)
    into = room(crew.units[1], 3)
    crew.members[0].shards.fetch(crew.units[1], into)
    assert into[0].tolist() == [2.0] * 9


def test_having_seen_one_epoch_published_says_nothing_of_the_next(crew: Crew) -> None:
    crew.publish_all()
    crew.members[0].protocol.await_published((1,))
    crew.publish(0)
    with crew.late():
        crew.members[0].protocol.await_published((1,))


# push, done and wait -------------------------------------------------------------------------------------------------


def test_push_waits_for_the_owner_to_open_the_epoch(crew: Crew) -> None:
    """Else it would add to sums that are zeroed afterwards."""
    crew.publish(0)
    with crew.late("waiting for rank 13 to publish epoch 1"):
        crew.members[0].pusher.push(crew.units[0], ones(crew.units[0], 3))
    assert not crew.layouts[1].peer(1).accumulator(crew.units[0]).any()


def test_push_counts_bytes_that_left(crew: Crew) -> None:
    crew.publish_all()
    sent = crew.members[2].pusher.push(crew.units[0], ones(crew.units[0], 3))
    assert sent == 2 * (4 * 4 + 2)
    assert crew.layouts[0].peer(2).board.load(Word.PUSHED) == sent


def test_a_full_ring_names_the_rank_whose_server_is_behind() -> None:
    with Crew([[("w", 64, F32)]], 2, settings=SHORT, by_hand=True) as crew:
        crew.publish_all()
        for _ in range(2):
            crew.members[0].pusher.push(crew.units[0], ones(crew.units[0], 2))
        with crew.late("waiting for a free staging slot of rank 13"):
            crew.members[0].pusher.push(crew.units[0], ones(crew.units[0], 2))


def test_done_tells_every_member_how_often_each_parameter_was_pushed(crew: Crew) -> None:
    crew.publish_all()
    endpoint, (first, second) = crew.members[1], crew.units
    endpoint.pusher.push(first, ones(first, 3))
    endpoint.pusher.push(first, ones(first, 3)[1:])
    endpoint.pusher.push(second, [])
    for member in range(3):
        assert not crew.layouts[member].peer(member).pushes(1).any(), "counts are for after the push"
    endpoint.done(Outcome.TRAINED)
    for member in range(3):
        assert crew.layouts[member].peer(member).pushes(1).tolist() == [1, 2, 0]
        assert not crew.layouts[member].peer(member).pushes(0).any()
        assert not crew.layouts[member].peer(member).pushes(2).any()
    assert crew.layouts[0].peer(1).board.load(Word.DONE) == 1


def test_counts_wait_until_the_other_replica_has_read_the_last_ones() -> None:
    """A push reaches the own replica alone, its counts reach all: a slow rank must have read those of epoch 1."""
    with Crew(LAYOUT, 1, replicas=2, settings=SHORT) as crew:
        crew.publish_all()
        crew.members[0].pusher.push(crew.units[1], ones(crew.units[1], 1))
        crew.members[0].done(Outcome.TRAINED)
        crew.publish(0)
        crew.members[0].pusher.push(crew.units[1], ones(crew.units[1], 1))
        with crew.late("rank 13 to publish epoch 2"):
            crew.members[0].done(Outcome.TRAINED)
        assert crew.layouts[1].peer(1).pushes(0).tolist() == [0, 0, 1]
        assert crew.layouts[1].peer(0).board.load(Word.DONE) == 1, "not done before the counts are out"
        crew.publish(1)
        crew.members[0].done(Outcome.TRAINED)
        assert crew.layouts[1].peer(1).pushes(0).tolist() == [0, 0, 2]


def test_a_rank_that_pushed_nothing_needs_nobody_to_be_done(crew: Crew) -> None:
    crew.publish(0)
    crew.members[0].done(Outcome.TRAINED)
    assert crew.layouts[1].peer(0).board.load(Word.DONE) == 1
    crew.publish(1)
    assert crew.members[1].protocol.closed_as(Outcome.TRAINED) == [0]
    assert crew.members[1].protocol.closed_as(Outcome.EVALUATED) == []


def test_an_epoch_of_evaluation_is_marked_as_such(crew: Crew) -> None:
    crew.publish(0)
    crew.members[0].done(Outcome.EVALUATED)
    board = crew.layouts[1].peer(0).board
    assert [board.load(w) for w in (Word.DONE, Word.COMPLETE, Word.READ)] == [1, 1, 1]
    crew.publish(1)
    assert crew.members[1].protocol.closed_as(Outcome.EVALUATED) == [0]


def test_an_outcome_is_still_there_when_its_rank_has_closed_one_more_epoch(crew: Crew) -> None:
    """A fast rank may close the next epoch before a slow one has looked at the last."""
    crew.publish_all()
    crew.members[0].done(Outcome.ABANDONED, "no memory for sample 7")
    for slow in (1, 2):
        crew.members[slow].done(Outcome.TRAINED)
    crew.publish(0)
    crew.members[0].done(Outcome.EVALUATED)
    assert crew.members[1].protocol.closed_as(Outcome.ABANDONED) == [0]
    assert crew.members[1].protocol.closed_as(Outcome.EVALUATED) == []
    assert crew.members[1].protocol.abandonment(0) == "no memory for sample 7"
    crew.publish(0)
    crew.members[0].done(Outcome.ABANDONED, "again, in a long sentence: " + "word " * 1000)
    assert crew.members[0].protocol.abandonment(0).startswith("again, in a long sentence: word ")


def test_await_done_needs_everybody_and_names_who_is_missing(crew: Crew) -> None:
    crew.publish_all()
    crew.members[0].done(Outcome.TRAINED)
    crew.members[1].done(Outcome.TRAINED)
    with crew.late("waiting for rank 16 to finish epoch 1"):
        crew.members[0].protocol.await_done(1)
    crew.members[2].done(Outcome.TRAINED)
    crew.members[0].protocol.await_done(1)


def test_the_next_epoch_waits_until_the_replicas_have_read_the_sums() -> None:
    with Crew(LAYOUT, 1, replicas=2, settings=SHORT) as crew:
        protocol = crew.members[0].protocol
        protocol.await_end_of_epoch()  # there was none
        crew.publish_all()
        for member in crew.members:
            member.done(Outcome.TRAINED)
        with crew.late("waiting for rank 13 to read the accumulators of epoch 1"):
            protocol.await_end_of_epoch()
        crew.members[1].protocol.read_all()
        protocol.await_end_of_epoch()


def test_await_accumulated_needs_every_block_that_was_posted() -> None:
    with Crew(LAYOUT, 2, settings=SHORT, by_hand=True) as crew:
        for epoch in (1, 2):
            crew.publish_all()
            crew.members[0].pusher.push(crew.units[0], ones(crew.units[0], 2))
            with crew.late("this rank's server to add what rank 10 pushed"):
                crew.members[1].protocol.await_accumulated()
            crew.drain(1)
            crew.members[1].protocol.await_accumulated()
            crew.members[0].protocol.await_accumulated()
            assert crew.layouts[1].peer(1).accumulator(crew.units[0]).tolist() == [1.0] * 5, f"epoch {epoch}"


# abort ---------------------------------------------------------------------------------------------------------------


def test_an_abort_reaches_everybody_and_stops_every_verb(crew: Crew) -> None:
    crew.publish_all()
    crew.members[2].protocol.abort("rank 16 has no more milk", 16)
    unit = crew.units[0]
    calls: list[Callable[[], object]] = [
        lambda: crew.members[0].protocol.touch("working"),
        lambda: crew.members[0].shards.fetch(unit, room(unit, 3)),
        lambda: crew.members[0].pusher.push(unit, ones(unit, 3)),
        lambda: crew.members[1].protocol.await_done(0),
        lambda: crew.members[1].protocol.await_accumulated(),
        lambda: crew.members[2].protocol.touch("working"),
    ]
    for call in calls:
        with pytest.raises(PeerLostError, match="aborted by rank 16: rank 16 has no more milk"):
            call()


def test_touch_is_progress(crew: Crew) -> None:
    before = crew.layouts[1].peer(0).board.load(Word.PROGRESS)
    crew.members[0].protocol.touch("working")
    assert crew.layouts[1].peer(0).board.load(Word.PROGRESS) == before + 1
