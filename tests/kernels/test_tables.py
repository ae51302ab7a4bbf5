"""Tables of numbers for launches: kept ones, and those that pass through a ring."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from support.kernel_heaps import failures_of_threads
from support.on_ranks import on_interpreted_ranks


@on_interpreted_ranks(1)
def test_tables_are_kept(rank: int, world: int) -> None:
    """Equal numbers are one table; no table stands for other numbers, however many there were."""
    from odc.kernels import pointer_table

    cpu = torch.device("cpu")
    assert pointer_table([1, 2], cpu) is pointer_table([1, 2], cpu)
    for i in range(3000):
        assert pointer_table([i, -i], cpu).tolist() == [i, -i]
    assert pointer_table([1, 2], cpu).tolist() == [1, 2]
    assert pointer_table([1 << 62], cpu).tolist() == [1 << 62]


@on_interpreted_ranks(1)
def test_a_ring_allocates_nothing_and_forgets_what_was_asked_for_longest_ago(rank: int, world: int) -> None:
    from odc.kernels.tables import NUMBERS, SLOTS, TableRing

    ring = TableRing(torch.device("cpu"))
    first = ring.table((1, 2))
    assert first.tolist() == [1, 2] and first.dtype == torch.int64
    memory = first.untyped_storage().data_ptr()
    for i in range(SLOTS - 1):
        found = ring.table((i, -i, 1 << 62))
        assert found.tolist() == [i, -i, 1 << 62] and found.untyped_storage().data_ptr() == memory
    assert first.tolist() == [1, 2], "there was room for all"
    assert ring.table((1, 2)).data_ptr() == first.data_ptr(), "it is there: nothing is copied"
    oldest = ring.table((0, 0, 1 << 62)).data_ptr()
    ring.table((7,) * NUMBERS)
    assert first.tolist() == [1, 2] and ring.table((0, 0, 1 << 62)).data_ptr() == oldest, "asked for again"
    for i in range(3 * SLOTS):
        assert ring.table((i, i)).tolist() == [i, i]
    assert ring.table((1, 2)).tolist() == [1, 2]
    assert ring.table(()).tolist() == []


@on_interpreted_ranks(1)
def test_a_table_passes_through_the_ring_of_its_stream(rank: int, world: int) -> None:
    from odc.kernels import passing_table, pointer_table, reserve_tables
    from odc.kernels.tables import NUMBERS, _rings

    cpu = torch.device("cpu")
    before = passing_table([1, 2], cpu)
    assert before is pointer_table([1, 2], cpu), "without a ring it is allocated"
    reserve_tables(cpu)
    (ring,) = _rings.values()
    reserve_tables(cpu)
    assert list(_rings.values()) == [ring], "one a stream"
    found = passing_table([1, 2], cpu)
    assert found.tolist() == [1, 2] and found.untyped_storage().data_ptr() == ring._there.data_ptr()
    many = passing_table(range(2000), cpu)  # of a unit of so many parameters
    assert many.tolist() == list(range(2000)) and many.untyped_storage().data_ptr() == ring._there.data_ptr()
    assert passing_table([3] * (NUMBERS + 1), cpu).tolist() == [3] * (NUMBERS + 1), "longer ones are allocated"


@on_interpreted_ranks(1)
def test_a_table_stays_while_a_thread_is_held_up_before_its_launch(rank: int, world: int) -> None:
    """As long as it takes another one to compile: others ask the stream for any number of tables meanwhile."""
    from odc.kernels.tables import HELD, SLOTS, TableRing

    ring = TableRing(torch.device("cpu"))

    def ask(numbers: Iterable[int]) -> None:
        for i in numbers:
            assert ring.table((i, -i)).tolist() == [i, -i]

    def ask_in_a_thread(numbers: Iterable[int]) -> None:
        assert not failures_of_threads(1, lambda _: ask(numbers), 60)

    held = [ring.table((7, 7, i)) for i in range(HELD)]
    ask_in_a_thread(range(3 * SLOTS))
    assert [table.tolist() for table in held] == [[7, 7, i] for i in range(HELD)]
    ring.table((7, 7, 0)), ask(range(1))  # the first is the latest but one
    ask_in_a_thread(range(1, 3 * SLOTS))
    assert held[0].tolist() == [7, 7, 0] and held[1].tolist() != [7, 7, 1], "as many as are held, and no more"


@on_interpreted_ranks(1)
def test_threads_that_hold_every_slot_find_room_elsewhere(rank: int, world: int) -> None:
    from odc.kernels.tables import HELD, SLOTS, TableRing

    ring, found = TableRing(torch.device("cpu")), dict[int, torch.Tensor]()
    over, count = threading.Event(), -(-SLOTS // HELD)
    asked = threading.Barrier(count + 1)

    def ask(first: int) -> None:
        for i in range(first, first + HELD):
            found[i] = ring.table((i, i))
        asked.wait(60)
        assert over.wait(60)

    threads = [threading.Thread(target=ask, args=(HELD * i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    asked.wait(60)
    assert all(table.tolist() == [i, i] for i, table in found.items()) and len(found) == count * HELD
    inside = sum(table.untyped_storage().data_ptr() == ring._there.data_ptr() for table in found.values())
    assert inside == SLOTS < len(found)
    over.set()
    for thread in threads:
        thread.join()
    threads.clear()
    del thread
    last = ring.table((-1, -1))
    assert last.untyped_storage().data_ptr() == ring._there.data_ptr(), "what ended threads held makes room"
