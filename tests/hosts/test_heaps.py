"""Reads of other hosts' heaps: how many are in progress, and what becomes of them when one fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from support.deferred import late_heaps
from support.spread import Spread

from odc.errors import PeerLostError
from odc.protocol import Word, regions, wait
from odc.protocol.heap_reader import HeapRead
from odc.protocol.queue import Queue


def reads_of(spread: Spread, places: list[torch.Tensor], order: list[object]) -> Iterator[HeapRead]:
    """Of the shard of unit 0 of member 2, by member 0; `order` gets a number when it is asked for, and its negative
    when it is there.
    """
    for number, place in enumerate(places, 1):
        order.append(number)
        yield HeapRead(2, "published/0", 0, place, "unit", lambda number=number: order.append(-number))


def places_of(spread: Spread, count: int) -> list[torch.Tensor]:
    nbytes = spread.group.units[0].published_bytes
    return [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)]


def test_the_next_read_begins_before_the_last_has_ended(spread: Spread) -> None:
    spread.publish(5.0)
    places, order = places_of(spread, 4), list[object]()
    spread.heaps[0].read_all(reads_of(spread, places, order))
    assert order == [1, 2, -1, 3, -2, 4, -3, -4], "each is announced in its turn, with one more in progress"
    assert spread.engines[0].most == 2
    for place in places:
        assert place.view(torch.float32)[0] == 7.0


def test_a_read_that_fails_drops_the_one_behind_it(spread: Spread, monkeypatch: pytest.MonkeyPatch) -> None:
    spread.publish(5.0)
    monkeypatch.setattr(wait, "REASON_S", 0.0)  # no link will explain it
    places, order = places_of(spread, 3), list[object]()
    spread.engines[0].fails = True
    with pytest.raises(PeerLostError, match="connection reset"):
        spread.heaps[0].read_all(reads_of(spread, places, order))
    assert order == [1, 2] and not spread.engines[0].going()


def test_a_claim_that_fails_drops_what_is_in_progress(spread: Spread) -> None:
    spread.publish(5.0)
    order = list[object]()

    def reads() -> Iterator[HeapRead]:
        yield from reads_of(spread, places_of(spread, 1), order)
        raise PeerLostError("a process died while it held the lock")

    with pytest.raises(PeerLostError, match="lock"):
        spread.heaps[0].read_all(reads())
    assert order == [1] and not spread.engines[0].going()


@pytest.fixture
def landing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spread]:
    """On a device whose engine reads into this rank's memory only, through landings of 16 bytes."""
    monkeypatch.setattr(regions, "_LANDING_BYTES", 16)
    late_heaps(monkeypatch)
    made = Spread(only_into_own=True)
    yield made
    made.close()


def test_landings_are_two_of_bounded_size(landing: Spread) -> None:
    layout = landing.group.layouts[0]
    assert [layout.landing(number).numel() for number in range(2)] == [64, 64], "no region is smaller"
    assert layout.ledger()["cache"] == 2 * 64 + sum(
        nbytes for name, nbytes in layout.heap.bytes_by_name().items() if name.startswith("cache/")
    )


def test_a_shard_comes_in_parts_two_at_a_time(landing: Spread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(landing.group.layouts[0]), "landing_bytes", 16)
    landing.publish(5.0)
    share, unit = landing.group.layouts[0].share(3), landing.group.units[0]  # whose cache lies in member 1's heap
    place = share.published_bytes(unit)[: unit.published_bytes]
    order = list[object]()
    heaps, lanes = landing.heaps[0], landing.group.layouts[0].heap.lanes
    offset = landing.group.layouts[0].buffer_offset(unit, 1)
    with lanes.lane("ahead"):
        heaps.read_all([HeapRead(3, "published/0", offset, place, "unit", lambda: order.append(place.tolist()))])
    assert place.view(torch.float32)[:8].tolist() == [8.0] * 8
    assert order == [place.tolist()], "it is announced once, with all of its parts there"
    assert landing.engines[0].most == 2
    assert [nbytes for _, nbytes in landing.engines[0].reads] == [16] * (unit.published_bytes // 16)


def test_a_landing_comes_back_from_a_read_that_fails(landing: Spread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait, "REASON_S", 0.0)
    landing.publish(5.0)
    share, unit = landing.group.layouts[0].share(3), landing.group.units[0]
    place, heaps = share.published_bytes(unit)[: unit.published_bytes], landing.heaps[0]
    landing.engines[0].fails = True
    for _ in range(3):
        with pytest.raises(PeerLostError, match="connection reset"):
            heaps.read_all([HeapRead(3, "published/0", 0, place, "unit")] * 3)
    landing.engines[0].fails = False
    heaps.read(3, "published/0", 0, place, "unit")


def test_threads_that_share_landings_do_not_wait_for_each_other_for_ever(landing: Spread) -> None:
    """Each has one and would like another."""
    landing.publish(5.0)
    share, unit = landing.group.layouts[0].share(3), landing.group.units[0]
    place, lanes = share.published_bytes(unit)[: unit.published_bytes], landing.group.layouts[0].heap.lanes
    both, ended = threading.Barrier(2), list[int]()

    def live(number: int) -> None:
        def reads() -> Iterator[HeapRead]:
            for turn in range(20):
                if turn == 1:
                    both.wait(60)  # each has begun one
                yield HeapRead(3, "published/0", 0, place, "unit")

        with lanes.lane(f"lane {number}"):
            landing.heaps[0].read_all(reads())
        ended.append(number)

    threads = [threading.Thread(target=live, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(ended) == [0, 1]


def test_the_tables_of_a_queue_are_read_two_at_a_time() -> None:
    spread = Spread(queue_bytes=1 << 16)
    spread.publish()
    queues = [Queue(member.protocol, heaps) for member, heaps in zip(spread.group.members, spread.heaps, strict=True)]
    for queue in queues:
        queue.offer([])
    spread.mirror(Word.OFFERED)
    for me in (0, 1):
        assert queues[me].claim() is None
        assert [rank for rank, _ in spread.engines[me].reads] == [16, 19]
        assert spread.engines[me].most == 2
    spread.close()
