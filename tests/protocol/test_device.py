"""Push and drain of a device's memory: how often they wait, launch and lock (see `support.deferred`)."""

from __future__ import annotations

import pytest
import torch
from support.deferred import DeferredLanes, DeferredMover, late_heaps
from support.members import BF16, F32, HeapGroup

from odc.memory import RobustMutex
from odc.protocol import Gradient, Outcome, UnitSpec
from odc.settings import Settings

MATRICES = [[(f"w{i}", 3000, BF16) for i in range(4)], [("v", 40, BF16), ("b", 5, BF16)]]
MIXED = [[("w", 3000, BF16), ("norm", 7, F32), ("u", 50, BF16), ("d", 4, F32)]]


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> list[DeferredLanes]:
    return late_heaps(monkeypatch)


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes the lock of an accumulator."""

    def refuse(*_: object) -> None:
        raise AssertionError("a lock was taken")

    monkeypatch.setattr(RobustMutex, "held", refuse)


def gradients(unit: UnitSpec, shards: int, value: float, short: int = 0) -> list[Gradient]:
    """Of every parameter, `short` elements short of whole shards."""
    return [
        Gradient(i, torch.full((shards * p.numel - short,), value, dtype=p.dtype)) for i, p in enumerate(unit.params)
    ]


def push(group: HeapGroup, lanes: DeferredLanes, member: int, index: int, sent: list[Gradient]) -> None:
    with lanes.lane("push"):
        group.members[member].pusher.push(group.units[index], sent)
    for gradient in sent:
        gradient.values.fill_(777.0)  # its memory is another's as soon as `push` returns


def asked(group: HeapGroup, member: int, name: str, patch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of places, or values, at every call of a function of the member's mover."""
    mover, calls = group.layouts[member].mover, list[int]()
    assert isinstance(mover, DeferredMover)
    ask = getattr(mover, name)
    patch.setattr(mover, name, lambda first, *rest: (calls.append(len(first)), ask(first, *rest)), raising=False)
    return calls


def test_a_push_waits_once_and_fills_one_slot_of_each_owner(
    deferred: list[DeferredLanes], no_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HeapGroup(MATRICES, 4, by_hand=True) as group:
        ring = group.layouts[0].ring
        assert (ring.slots, ring.slot_bytes) == (2, 24000), "a slot is as large as the largest chunk"
        group.publish_all()
        staged = asked(group, 1, "stage", monkeypatch)
        before = deferred[1].settled
        push(group, deferred[1], 1, 0, gradients(group.units[0], 4, 2.0))
        assert deferred[1].settled - before == 1, "one wait for all owners and the own chunk"
        assert staged == [4], "one call for all owners"
        assert group.notified == [2, 3, 0]
        assert [group.layouts[owner].mine.sent.load(1) for owner in range(4)] == [1, 0, 1, 1], "one block an owner"
        for owner in (0, 2, 3):
            group.drain(owner)
        assert [set(layout.mine.accumulator(group.units[0]).tolist()) for layout in group.layouts] == [{2.0}] * 4


def test_a_slot_holds_all_that_a_push_brings(deferred: list[DeferredLanes]) -> None:
    with HeapGroup([[("w", 1 << 20, BF16)]], 2) as group:
        assert (group.layouts[0].ring.slots, group.layouts[0].ring.slot_bytes) == (2, 2 << 20)


def test_the_own_chunk_is_added_after_it_was_computed(
    deferred: list[DeferredLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane that adds it has nothing else to do, and would begin at once."""
    with HeapGroup(MATRICES, 2, by_hand=True) as group:
        group.publish_all()
        lanes, mover = deferred[0], group.layouts[0].mover
        assert isinstance(mover, DeferredMover)
        add = mover.add_part
        monkeypatch.setattr(mover, "add_part", lambda *args: (add(*args), lanes.settle()), raising=False)
        sent = gradients(group.units[1], 2, 777.0)
        with lanes.lane("push"):
            for gradient in sent:
                lanes.ask(lambda gradient=gradient: gradient.values.fill_(4.0))
            group.members[0].pusher.push(group.units[1], sent)
        assert set(group.layouts[0].mine.accumulator(group.units[1]).tolist()) == {4.0}


def test_a_drain_waits_once_and_adds_what_all_sources_pushed_in_one_call(
    deferred: list[DeferredLanes], no_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HeapGroup(MATRICES, 4, by_hand=True) as group:
        group.publish_all()
        for member in (1, 2, 3):
            push(group, deferred[member], member, 0, gradients(group.units[0], 4, 10.0**member))
        push(group, deferred[1], 1, 1, gradients(group.units[1], 4, 3.0))
        added, before = asked(group, 0, "add_all", monkeypatch), deferred[0].settled
        assert group.drain(0) == 2, "a quarter of a ring at a time, at least one block"
        assert added == [1, 1] and deferred[0].settled - before == 2
        assert set(group.layouts[0].mine.accumulator(group.units[0]).tolist()) == {1110.0}
        assert set(group.layouts[0].mine.accumulator(group.units[1]).tolist()) == {3.0}


def test_sources_at_different_units_are_added_in_one_call(
    deferred: list[DeferredLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with HeapGroup(MATRICES, 3, by_hand=True) as group:
        group.publish_all()
        push(group, deferred[1], 1, 0, gradients(group.units[0], 3, 1.0))
        push(group, deferred[2], 2, 1, gradients(group.units[1], 3, 2.0))
        added = asked(group, 0, "add_all", monkeypatch)
        assert group.drain(0) == 1 and added == [2]
        totals = [set(group.layouts[0].mine.accumulator(unit).tolist()) for unit in group.units]
        assert totals == [{1.0}, {2.0}]


def test_blocks_that_overlap_are_added_one_after_the_other(
    deferred: list[DeferredLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that pushed two of four parameters covers a part of what another pushed."""
    with HeapGroup(MATRICES, 3, by_hand=True) as group:
        group.publish_all()
        push(group, deferred[1], 1, 0, gradients(group.units[0], 3, 1.0))
        push(group, deferred[2], 2, 0, gradients(group.units[0], 3, 2.0)[1:3])
        added = asked(group, 0, "add_all", monkeypatch)
        assert group.drain(0) == 1 and added == [1, 1]
        total = group.layouts[0].mine.accumulator(group.units[0]).view(4, 3000)
        assert [set(row.tolist()) for row in total] == [{1.0}, {3.0}, {3.0}, {1.0}]


def test_direct_adds_go_to_all_owners_in_one_call_without_a_lock(
    monkeypatch: pytest.MonkeyPatch, no_locks: None
) -> None:
    deferred = late_heaps(monkeypatch, atomic=True)
    with HeapGroup(MATRICES, 3, settings=Settings(accumulate="direct", timeout_s=60.0)) as group:
        group.publish_all()
        for member in range(3):
            before, calls = deferred[member].settled, asked(group, member, "accumulate_all", monkeypatch)
            push(group, deferred[member], member, 0, gradients(group.units[0], 3, 1.0 + member))
            assert deferred[member].settled - before == 1 and calls == [4]
        assert [set(layout.mine.accumulator(group.units[0]).tolist()) for layout in group.layouts] == [{6.0}] * 3


def test_without_atomic_adds_a_direct_push_takes_the_lock(deferred: list[DeferredLanes], no_locks: None) -> None:
    with HeapGroup(MATRICES, 2, settings=Settings(accumulate="direct", timeout_s=60.0)) as group:
        group.publish_all()
        with pytest.raises(AssertionError, match="a lock was taken"):
            push(group, deferred[0], 0, 0, gradients(group.units[0], 2, 1.0))


@pytest.mark.parametrize("short", [0, 3])
def test_several_dtypes_and_short_gradients_arrive_whole(deferred: list[DeferredLanes], short: int) -> None:
    """Four runs through two slots: the pusher tells of what it has posted before it waits for a slot."""
    with HeapGroup(MIXED, 3) as group:
        (unit,) = group.units
        for epoch in (1, 2):
            group.publish_all()
            for member in range(3):
                push(group, deferred[member], member, 0, gradients(unit, 3, 1.0 + member, short))
            for endpoint in group.members:
                endpoint.done(Outcome.TRAINED)
            for owner, endpoint in enumerate(group.members):
                endpoint.protocol.await_done(epoch)
                endpoint.protocol.await_accumulated()
                total = group.layouts[owner].mine.accumulator(unit)
                for spec in unit.params:
                    real = max(0, min(spec.numel, 3 * spec.numel - short - owner * spec.numel))
                    part = total[spec.accumulator_offset : spec.accumulator_offset + spec.numel]
                    assert part.tolist() == [6.0] * real + [0.0] * (spec.numel - real), (owner, spec.name)


def test_gradients_wider_than_the_slots_go_in_blocks(deferred: list[DeferredLanes]) -> None:
    with HeapGroup(MATRICES, 2) as group:
        group.publish_all()
        sent = [Gradient(i, torch.full((6000,), 1.0 + i, dtype=torch.float64)) for i in range(4)]
        push(group, deferred[0], 0, 0, sent)
        for layout in group.layouts:
            total = layout.mine.accumulator(group.units[0]).view(4, 3000)
            assert [set(row.tolist()) for row in total] == [{1.0}, {2.0}, {3.0}, {4.0}]
