from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.members import F32, Crew

from odc.runtime import Gradient, RootState, Word
from odc.settings import Settings
from odc.trace import PUSH, recorder


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew([[("w", 8, F32)]], 3, settings=Settings(timeout_s=1.0), by_hand=True) as crew:
        crew.attach()
        crew.publish_all()
        yield crew


def push(crew: Crew, member: int, value: float) -> None:
    crew.members[member].pusher.push(crew.units[0], [Gradient(0, torch.full((24,), value))])


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_a_drain_takes_a_quarter_of_the_ring_of_every_source(crew: Crew, owner: int) -> None:
    """So that a rank which pushes much does not hold up the others."""
    service, sources = crew.services[owner], [member for member in range(3) if member != owner]
    for value in (1.0, 2.0):
        push(crew, sources[0], value)
        push(crew, sources[1], 10 * value)
    sums = []
    while service.drain():
        sums.append(crew.layouts[owner].peer(owner).accumulator(crew.units[0])[0].item())
    assert sums == [11.0, 33.0]
    assert [crew.layouts[owner].peer(owner).accumulated.load(source) for source in sources] == [2, 2]
    assert crew.layouts[owner].peer(owner).accumulated.load(owner) == 0
    assert not service.drain()


def test_blocks_of_one_source_do_not_wait_for_another(crew: Crew) -> None:
    push(crew, 2, 5.0)
    assert crew.services[0].drain()
    assert crew.layouts[0].peer(0).accumulator(crew.units[0]).tolist() == [5.0] * 8


def test_what_the_server_adds_is_recorded_on_its_lane(crew: Crew) -> None:
    push(crew, 1, 1.0)
    recorder().clear()
    crew.services[0].drain()
    (span,) = recorder().spans()
    assert (span.category, span.lane, span.unit, span.peer, span.nbytes) == (PUSH, "server", "u0", 13, 32)


@pytest.mark.parametrize("accumulate", ["direct", "per_source"])
def test_there_is_nothing_to_drain_where_pushers_add(accumulate: str) -> None:
    with Crew([[("w", 8, F32)]], 2, settings=Settings(accumulate=accumulate)) as crew:  # type: ignore[arg-type]
        assert not crew.services[0].drain()
        assert crew.services[0].status()["slots"] == 0


def test_a_death_is_told_to_everybody_with_the_rank_and_its_epoch(crew: Crew) -> None:
    crew.publish(1)
    crew.members[1].protocol.board.store(Word.DONE, 1)
    crew.services[0].peer_died(1)
    for member in range(3):
        assert crew.layouts[2].peer(member).board.load(Word.ABORT) == 1 + 13
        assert crew.layouts[2].peer(member).reason == "rank 13 died in epoch 2 (done with 1)"


def test_a_rank_that_had_left_has_not_died(crew: Crew) -> None:
    crew.members[1].protocol.board.store(Word.LEFT, 1)
    crew.services[0].peer_died(1)
    assert [crew.layouts[0].peer(member).board.load(Word.ABORT) for member in range(3)] == [0, 0, 0]


def test_an_abort_attaches_to_nobody() -> None:
    """The daemon must not wait for a rank that may never come up."""
    with Crew([[("w", 8, F32)]], 3) as crew:
        crew.layouts[0].peer(2).attach()
        crew.services[0].abort("over", 10)
        assert not crew.layouts[0].heap.attached(1)
        aborted = [crew.layouts[member].peer(member).board.load(Word.ABORT) for member in range(3)]
        assert aborted == [11, 0, 11]


def test_only_who_knows_the_token_gets_the_heap(crew: Crew) -> None:
    service, heap = crew.services[0], crew.layouts[0].heap
    assert service.token != crew.services[1].token
    assert len(service.token) >= 32
    for request in ({}, {"token": None}, {"token": ""}, {"token": service.token[:-1]}, {"token": "é"}):
        assert service.answer_attach(request) == {"error": "wrong token"}
    assert service.answer_attach({"token": service.token}) == {"nbytes": heap.nbytes, "digest": heap.digest}


def test_status_says_where_the_rank_is(crew: Crew) -> None:
    board, service = crew.members[0].protocol.board, crew.services[0]
    idle = service.status()
    assert (idle["root"], idle["rank"], idle["ranks"], idle["epoch"], idle["done"]) == ("crew", 10, 3, 1, 0)
    assert (idle["state"], idle["waits_for"], idle["waits_in_epoch"]) == ("closed", None, None)
    assert idle["heap_bytes"] == crew.layouts[0].heap.nbytes
    assert (idle["slots"], idle["slots_in_use"]) == (2 * crew.layouts[0].ring.slots, 0)
    push(crew, 1, 1.0)
    push(crew, 2, 1.0)
    push(crew, 2, 1.0)
    board.store(Word.STATE, RootState.FINISHING)
    board.store(Word.MICROBATCH, 4)
    board.store(Word.FETCHED, 77)
    board.store(Word.PUSHED, 88)
    board.store(Word.WAITING, 1 + 16)
    board.store(Word.WAITING_EPOCH, 1)
    busy = service.status()
    assert (busy["state"], busy["microbatch"], busy["slots_in_use"]) == ("finishing", 4, 3)
    assert (busy["fetched_bytes"], busy["pushed_bytes"]) == (77, 88)
    assert (busy["waits_for"], busy["waits_in_epoch"]) == (16, 1)
    board.store(Word.ABORT, 1)
    assert service.status()["state"] == "aborted"


def test_a_state_that_this_version_does_not_know_is_no_error(crew: Crew) -> None:
    crew.members[0].protocol.board.store(Word.STATE, 99)
    assert crew.services[0].status()["state"] == "unknown"
