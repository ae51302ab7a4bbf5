from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.members import F32, HeapGroup

from odc.errors import PeerLostError
from odc.protocol import Word
from odc.settings import Settings
from odc.trace import PUSH, recorder


@pytest.fixture
def group() -> Iterator[HeapGroup]:
    with HeapGroup([[("w", 8, F32)]], 3, settings=Settings(timeout_s=1.0), by_hand=True) as group:
        group.attach()
        group.publish_all()
        yield group


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_a_drain_takes_a_quarter_of_the_ring_of_every_source(group: HeapGroup, owner: int) -> None:
    """So that a rank which pushes much does not hold up the others."""
    service, sources = group.services[owner], [member for member in range(3) if member != owner]
    for value in (1.0, 2.0):
        group.push(sources[0], value)
        group.push(sources[1], 10 * value)
    sums = []
    while service.drain():
        sums.append(group.layouts[owner].peer(owner).accumulator(group.units[0])[0].item())
    assert sums == [11.0, 33.0]
    assert [group.layouts[owner].peer(owner).accumulated.load(source) for source in sources] == [2, 2]
    assert group.layouts[owner].peer(owner).accumulated.load(owner) == 0
    assert not service.drain()


def test_blocks_of_one_source_do_not_wait_for_another(group: HeapGroup) -> None:
    group.push(2, 5.0)
    assert group.services[0].drain()
    assert group.layouts[0].peer(0).accumulator(group.units[0]).tolist() == [5.0] * 8


def test_what_the_server_adds_is_recorded_on_its_lane(group: HeapGroup) -> None:
    group.push(1, 1.0)
    recorder().clear()
    group.services[0].drain()
    (span,) = recorder().spans()
    assert (span.category, span.lane, span.unit, span.peer, span.nbytes) == (PUSH, "server", "u0", 13, 32)


def test_there_is_nothing_to_drain_where_pushers_add() -> None:
    with HeapGroup([[("w", 8, F32)]], 2, settings=Settings(accumulate="direct")) as group:
        assert not group.services[0].drain()
        assert group.services[0].status()["slots"] == 0


def end_process(group: HeapGroup, member: int) -> None:
    """As the daemon of member 0 does when the process of another one has ended."""
    loss = group.services[0].end_of(member)
    if loss is not None:
        group.services[0].lost(loss)


def test_a_death_aborts_every_member_with_the_rank_and_its_epoch(group: HeapGroup) -> None:
    group.publish(1)
    group.members[1].protocol.board.store(Word.DONE, 1)
    end_process(group, 1)
    for member in range(3):
        assert group.layouts[2].peer(member).board.load(Word.ABORT) == 1 + 13
        assert group.layouts[2].peer(member).reason == "rank 13 died in epoch 2 (done with 1)"


def test_a_rank_that_had_left_has_not_died(group: HeapGroup) -> None:
    group.members[1].protocol.board.store(Word.LEFT, 1)
    end_process(group, 1)
    assert [group.layouts[0].peer(member).board.load(Word.ABORT) for member in range(3)] == [0, 0, 0]


def test_an_abort_attaches_to_no_peer() -> None:
    """The daemon must not wait for a rank that may never come up."""
    with HeapGroup([[("w", 8, F32)]], 3) as group:
        group.layouts[0].peer(2).attach()
        group.services[0].abort("over", 10)
        assert not group.layouts[0].heap.attached(1)
        aborted = [group.layouts[member].peer(member).board.load(Word.ABORT) for member in range(3)]
        assert aborted == [11, 0, 11]


def test_only_the_token_opens_the_heap(group: HeapGroup) -> None:
    service, heap = group.services[0], group.layouts[0].heap
    assert service.token != group.services[1].token
    assert len(service.token) >= 32
    for request in ({}, {"token": None}, {"token": ""}, {"token": service.token[:-1]}, {"token": "é"}):
        assert service.answer_attach(request) == {"error": "wrong token"}
    assert service.answer_attach({"token": service.token}) == {"nbytes": heap.nbytes, "digest": heap.digest}


def test_status_shows_slots_in_use_and_an_abort(group: HeapGroup) -> None:
    """tests/runtime/test_daemon_status.py has the other fields, of a job that trains."""
    board, service = group.members[0].protocol.board, group.services[0]
    idle = service.status()
    assert (idle["slots"], idle["slots_in_use"]) == (2 * group.layouts[0].ring.slots, 0)
    group.push(1)
    group.push(2)
    group.push(2)
    board.store(Word.FETCHED, 77)
    board.store(Word.PUSHED, 88)
    busy = service.status()
    assert (busy["slots_in_use"], busy["fetched_bytes"], busy["pushed_bytes"]) == (3, 77, 88)
    board.store(Word.ABORT, 1)
    assert service.status()["state"] == "aborted"


def test_a_state_that_this_version_does_not_know_is_no_error(group: HeapGroup) -> None:
    group.members[0].protocol.board.store(Word.STATE, 99)
    assert group.services[0].status()["state"] == "unknown"


def test_a_wait_on_the_mirrors_of_a_rank_that_has_left_and_ended_names_it() -> None:
    """An error may end a rank before its daemon has hung up, and its mirrors are written no more."""
    with HeapGroup([[("w", 8, F32)]], 4, settings=Settings(timeout_s=60.0), hosts=(0, 0, 1, 1), by_hand=True) as group:
        group.attach_local()
        group.members[1].protocol.leave("ValueError: no such page", 19)
        end_process(group, 1)
        layout, waiter = group.layouts[0], group.members[0].protocol.waiter
        assert [layout.remote(member).board.load(Word.LEFT) != 0 for member in (2, 3)] == [False, True]
        assert not layout.mine.board.load(Word.ABORT), "it has left, and did its part for all that is known"
        with pytest.raises(
            PeerLostError, match="rank 13 has left the job .*; the last error there was ValueError"
        ) as it:
            waiter.until(lambda: False, 3, "rank 19 to put rows")
        assert it.value.culprit == 19
