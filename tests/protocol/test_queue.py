"""The queue in every order of events that its waits allow, and what it refuses."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import up_to
from support.members import F32, HeapGroup, member_of_pool
from support.ranks import RankPool

from odc.errors import OdcError, PeerLostError, UnsupportedError
from odc.protocol import Outcome, Word
from odc.protocol.heap_reader import HeapRead, MappedHeaps
from odc.protocol.queue import Claimed, Queue, progress
from odc.settings import Settings

LAYOUT = [[("w", 4, F32)]]
ROOM = 64 << 10


def made(member: int, epoch: int, number: int) -> dict[str, torch.Tensor]:
    """A microbatch that says where it comes from, of a length of its own."""
    return {"from": torch.tensor([member, epoch, number]), "ids": torch.arange(7 * (member + 1) + 31 * number)}


def origin(claimed: Claimed) -> tuple[int, int, int]:
    member, epoch, number = claimed.tensors["from"].tolist()
    assert torch.equal(claimed.tensors["ids"], made(member, epoch, number)["ids"]), "the copy is not what was offered"
    assert claimed.member == member
    return member, epoch, number


def group_of(members: int, **more: Any) -> HeapGroup:
    return HeapGroup(LAYOUT, members, settings=Settings(timeout_s=0.2, queue_bytes=ROOM), **more)


def queue(group: HeapGroup, member: int) -> Queue:
    found = group.members[member].queue
    assert found is not None
    return found


# any interleaving ------------------------------------------------------------------------------------------------


def live(group: HeapGroup, member: int, counts: Sequence[Sequence[int]], found: list[list[Any]]) -> Iterator[None]:
    """Minibatches of one member as `odc.fsdp` runs them; gives way wherever another rank may overtake it."""
    endpoint, boards = group.members[member], [group.layouts[member].peer(m).board for m in range(len(group.ranks))]
    for epoch, by_member in enumerate(counts, 1):
        while any(board.load(Word.DONE) < epoch - 1 for board in boards):  # else it would wait
            yield
        group.publish(member, dirty=False)
        yield
        queue(group, member).offer([made(member, epoch, i) for i in range(by_member[member])])
        yield
        while any(board.load(Word.OFFERED) < epoch for board in boards):
            yield
        while (claimed := endpoint.queue.claim()) is not None:
            found[epoch - 1].append((claimed.number, origin(claimed)))
            yield
        assert not queue(group, member).left_early
        yield
        endpoint.done(Outcome.TRAINED)
        yield


@settings(max_examples=up_to(60))
@given(
    counts=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 32),
    replicas=st.booleans(),
)
def test_each_microbatch_is_claimed_once_in_any_order_of_events(
    counts: list[list[int]], seed: int, replicas: bool
) -> None:
    draw, found = random.Random(seed), [list[Any]() for _ in counts]
    with group_of(1, replicas=3) if replicas else group_of(3) as group:
        ranks = [live(group, member, counts, found) for member in range(3)]
        while ranks:
            rank = draw.choice(ranks)
            try:
                next(rank)
            except StopIteration:
                ranks.remove(rank)
    for epoch, (by_member, claims) in enumerate(zip(counts, found, strict=True), 1):
        offered = {(member, epoch, i) for member in range(3) for i in range(by_member[member])}
        assert sorted(number for number, _ in claims) == list(range(len(offered)))
        assert {where for _, where in claims} == offered
        bytes_of = [made(*where)["ids"].numel() for _, where in sorted(claims)]
        assert bytes_of == sorted(bytes_of, reverse=True), "the longest first"


# real processes --------------------------------------------------------------------------------------------------


def live_in_a_process(rank: int, world: int, epochs: int, count: int) -> list[list[int]]:
    """Claims of this rank by epoch, with pauses in between."""
    chosen = Settings(timeout_s=60.0, queue_bytes=ROOM)
    draw, found = random.Random(rank), list[list[int]]()
    with member_of_pool(rank, world, "queue", LAYOUT, chosen) as endpoint:
        for epoch in range(1, epochs + 1):
            endpoint.shards.publish([[torch.zeros(4)]], [False])
            assert endpoint.queue is not None
            endpoint.queue.offer([made(rank, epoch, i) for i in range(count)])
            found.append([])
            while (claimed := endpoint.queue.claim()) is not None:
                member, of, number = origin(claimed)
                assert of == epoch, "of another minibatch"
                found[-1].append(member * count + number)
                if draw.random() < 0.1:
                    time.sleep(draw.random() / 500)
            endpoint.done(Outcome.TRAINED)
            endpoint.protocol.await_done(epoch)
            endpoint.protocol.complete()
            endpoint.protocol.read_all()
    return found


def test_racing_processes_claim_each_microbatch_once(ranks: Any) -> None:
    pool: RankPool = ranks(4)
    epochs, count = 25, 12
    for by_rank in zip(*pool.run(live_in_a_process, epochs, count), strict=True):
        assert sorted(number for claims in by_rank for number in claims) == list(range(4 * count))


# waits and refusals ----------------------------------------------------------------------------------------------


def test_a_claim_waits_until_all_have_offered() -> None:
    with group_of(2) as group:
        group.publish_all()
        queue(group, 0).offer([made(0, 1, 0)])
        with group.late("rank 13 to offer its microbatches of epoch 1"):
            queue(group, 0).claim()
        queue(group, 1).offer([])
        found = queue(group, 0).claim()
        assert found is not None and origin(found) == (0, 1, 0)
        assert queue(group, 1).claim() is None and not queue(group, 1).left_early, "a rank may get nothing"
        assert queue(group, 0).left_early
        assert queue(group, 0).claim() is None
        assert not queue(group, 0).left_early
        assert queue(group, 0).claim() is None, "the end stays the end"


def test_a_member_that_is_done_without_an_offer_is_named_at_once() -> None:
    with group_of(2) as group:
        group.publish_all()
        queue(group, 0).offer([])
        group.members[1].done(Outcome.TRAINED)
        with pytest.raises(
            OdcError, match=r"rank 10 \(epoch 1\) .* rank 13 ended that minibatch without an offer"
        ) as it:
            queue(group, 0).claim()
        assert it.value.culprit == 13


def test_a_rank_that_abandons_before_its_offer_ends_the_queue_of_that_minibatch_only() -> None:
    with group_of(2) as group:
        group.publish_all()
        queue(group, 1).offer([made(1, 1, 0)])
        group.members[0].done(Outcome.ABANDONED, "bad sample")  # home: the counter of this epoch is not zeroed
        assert queue(group, 1).claim() is None
        assert not queue(group, 1).left_early
        group.members[1].done(Outcome.TRAINED)
        group.publish_all()
        for member in (0, 1):
            queue(group, member).offer([made(member, 2, 0)])
        found = [queue(group, 0).claim() for _ in range(2)]
        assert sorted(origin(one) for one in found if one) == [(0, 2, 0), (1, 2, 0)]


def test_costs_decide_the_order_and_ties_go_by_member() -> None:
    with group_of(2) as group:
        group.publish_all()
        queue(group, 1).offer([made(1, 1, 0), made(1, 1, 1), made(1, 1, 2)], [2.0, 0.25, 2.0])
        queue(group, 0).offer([made(0, 1, 0), made(0, 1, 1)], [-1, 2])
        found = [queue(group, n % 2).claim() for n in range(5)]
        assert [origin(one) for one in found if one] == [(0, 1, 1), (1, 1, 0), (1, 1, 2), (1, 1, 1), (0, 1, 0)]


def test_each_member_reads_the_tables_from_behind_its_own_place_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are longer than what is read at first once more."""
    monkeypatch.setattr("odc.protocol.queue._TABLE_BYTES", 64)
    tables, read = list[int](), MappedHeaps._read_mapped

    def noted(self: MappedHeaps, one: HeapRead) -> None:
        if one.offset == 0:
            tables.append(one.member)
        read(self, one)

    monkeypatch.setattr(MappedHeaps, "_read_mapped", noted)
    with group_of(3) as group:
        group.publish_all()
        for member, count in enumerate((1, 4, 0)):
            queue(group, member).offer([made(member, 1, i) for i in range(count)])
        found = list[Any]()
        for member, order in enumerate(([1, 2, 0, 1], [2, 0, 1, 1], [0, 1, 2, 1])):
            found.append(queue(group, member).claim())
            assert tables == order
            tables.clear()
        assert [origin(one) for one in found] == [(1, 1, 3), (1, 1, 2), (1, 1, 1)]


def test_what_was_claimed_is_a_copy() -> None:
    with group_of(1) as group:
        group.publish_all()
        queue(group, 0).offer([made(0, 1, 2)])
        found = queue(group, 0).claim()
        group.layouts[0].peer(0).offers().zero_()
        assert found is not None and origin(found) == (0, 1, 2)


def test_too_much_is_refused_with_the_bytes_it_takes() -> None:
    big = [{"ids": torch.zeros(ROOM // 8, dtype=torch.int32)}] * 2
    with group_of(1) as group:
        group.publish_all()
        with pytest.raises(
            UnsupportedError, match=r"rank 10 .epoch 1. offers 2 microbatches that take (\d+) bytes"
        ) as it:
            queue(group, 0).offer(big)
        needed = int(str(it.value).split("take ")[1].split()[0])
        assert f"Set it to {needed} or more" in str(it.value)
    with HeapGroup(LAYOUT, 1, settings=Settings(queue_bytes=needed)) as group:
        group.publish_all()
        queue(group, 0).offer(big)
        assert [one.nbytes for one in (queue(group, 0).claim(), queue(group, 0).claim()) if one] == [ROOM // 2 + 64] * 2


@pytest.mark.parametrize("costs", [[1.0], [1.0, math.nan], [1.0, math.inf]])
def test_costs_must_be_as_many_and_finite(costs: list[float]) -> None:
    with group_of(1) as group:
        group.publish_all()
        with pytest.raises(ValueError, match="2 microbatches need as many finite costs"):
            queue(group, 0).offer([made(0, 1, 0), made(0, 1, 1)], costs)


def test_one_offer_an_epoch_and_none_without_one() -> None:
    with group_of(1) as group:
        group.publish_all()
        with pytest.raises(OdcError, match="claims from the queue of a minibatch in which it has offered nothing"):
            queue(group, 0).claim()
        queue(group, 0).offer([])
        with pytest.raises(OdcError, match="offers a second time in one minibatch"):
            queue(group, 0).offer([])
        assert group.members[0].queue.claim() is None
        group.members[0].done(Outcome.TRAINED)
        group.publish(0)
        queue(group, 0).offer([made(0, 2, 0)])
        found = group.members[0].queue.claim()
        assert found is not None and origin(found) == (0, 2, 0), "the count begins anew"


def test_an_aborted_job_gives_no_more() -> None:
    with group_of(2) as group:
        group.publish_all()
        for member in (0, 1):
            queue(group, member).offer([made(member, 1, 0)])
        group.attach()
        group.members[1].protocol.abort("out of memory", 13)
        with pytest.raises(PeerLostError, match="claiming a microbatch: .* by rank 13: out of memory"):
            group.members[0].queue.claim()


def test_status_shows_the_progress_of_the_queue_by_rank() -> None:
    with group_of(3) as group:
        assert [progress(layout) for layout in group.layouts] == [None] * 3, "nothing is offered"
        for epoch in (1, 2):
            group.publish_all()
            for member, count in enumerate((3, 0, 2)):
                assert progress(group.layouts[member]) is None, "an offer of the last minibatch"
                queue(group, member).offer([made(member, epoch, i) for i in range(count)])
                waiting = {"offered": count, "claimed": 0, "handed_out": None, "total": None}
                assert progress(group.layouts[member]) == waiting
            for turn, member in enumerate((0, 2, 2, 0, 2, 0, 1, 2)):
                group.members[member].queue.claim()
                if turn == 2:
                    status = group.services[2].status()["queue"]
                    assert status == {"offered": 2, "claimed": 2, "handed_out": 3, "total": 5}
            found = [progress(layout) for layout in group.layouts]
            for member, (offered, claimed) in enumerate([(3, 2), (0, 0), (2, 3)]):
                assert found[member] == {"offered": offered, "claimed": claimed, "handed_out": 5, "total": 5}
            for endpoint in group.members:
                endpoint.done(Outcome.TRAINED)


def test_no_queue_takes_no_memory() -> None:
    with HeapGroup(LAYOUT, 2) as group:
        assert group.members[0].queue is None
        assert group.layouts[0].ledger()["queue"] == 0 and progress(group.layouts[0]) is None
    with group_of(2) as group:
        assert group.layouts[0].ledger()["queue"] == ROOM
