"""Pushes and drains of members on a device that does its work late (see `support.deferred`): few waits, no lock."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence, Sized
from typing import Any

import pytest
import torch
from support.deferred import DeferredLanes, DeferredMover, late_heaps, push
from support.members import BF16, F32, F64, HeapGroup, gradients

from odc.errors import WaitTimeoutError
from odc.memory import RobustMutex
from odc.movers import choice
from odc.protocol import Gradient, Outcome, UnitSpec, device, layout, regions
from odc.settings import ACCUMULATE_MODES, Settings

MATRICES = [[(f"w{i}", 3000, BF16) for i in range(4)], [("v", 40, BF16), ("b", 5, BF16)]]
MIXED = [[("w", 3000, BF16), ("norm", 7, F32), ("u", 50, BF16), ("d", 4, F32)]]


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> list[DeferredLanes]:
    return late_heaps(monkeypatch)


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lock of an accumulator is taken."""

    def refuse(*_: object) -> None:
        raise AssertionError("a lock was taken")

    monkeypatch.setattr(RobustMutex, "held", refuse)


def asked(group: HeapGroup, member: int, name: str, patch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of places, or values, at every call of a function of the member's mover."""
    mover, calls = group.layouts[member].mover, list[int]()
    assert isinstance(mover, DeferredMover)
    ask = getattr(mover, name)

    def noted(first: Sized, *rest: object) -> Any:
        calls.append(len(first))
        return ask(first, *rest)

    patch.setattr(mover, name, noted, raising=False)
    return calls


def test_a_push_waits_twice_and_fills_one_slot_of_each_owner(
    deferred: list[DeferredLanes], no_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HeapGroup(MATRICES, 4, by_hand=True) as group:
        ring = group.layouts[0].ring
        assert (ring.slots, ring.slot_bytes) == (2, 24000), "a slot is as large as the largest chunk"
        group.publish_all()
        staged = asked(group, 1, "stage", monkeypatch)
        before = deferred[1].settled
        push(group, deferred[1], 1, 0, gradients(group.units[0], 4, 2.0))
        assert deferred[1].settled - before == 2, "for the gradients; for all owners and the own chunk"
        assert staged == [4], "one call for all owners"
        assert group.notified == [2, 3, 0]
        assert [group.layouts[owner].mine.sent.load(1) for owner in range(4)] == [1, 0, 1, 1], "one block an owner"
        for owner in (0, 2, 3):
            group.drain(owner)
        assert [set(layout.mine.accumulator(group.units[0]).tolist()) for layout in group.layouts] == [{2.0}] * 4


def test_a_slot_holds_all_that_a_push_brings(deferred: list[DeferredLanes]) -> None:
    with HeapGroup([[("w", 1 << 20, BF16)]], 2) as group:
        assert (group.layouts[0].ring.slots, group.layouts[0].ring.slot_bytes) == (2, 2 << 20)


@pytest.mark.parametrize("accumulate", ACCUMULATE_MODES)
def test_gradients_are_computed_before_anything_is_asked_of_the_device(
    deferred: list[DeferredLanes], monkeypatch: pytest.MonkeyPatch, accumulate: str
) -> None:
    """Lane "server" would begin at once; the lock of a direct add would be held as long as this rank computes."""
    with HeapGroup(MATRICES, 2, settings=Settings(timeout_s=60.0, accumulate=accumulate), by_hand=True) as group:
        group.publish_all()
        lanes, mover = deferred[0], group.layouts[0].mover
        assert isinstance(mover, DeferredMover)
        sent, found = gradients(group.units[1], 2, 777.0), list[set[float]]()

        def noted(call: Callable[..., Any]) -> Callable[..., Any]:
            def note(*args: Any) -> Any:
                found.append({v for gradient in sent for v in gradient.values.tolist()})
                return call(*args)

            return note

        for where, name in ((mover, "stage"), (mover, "add_part"), (RobustMutex, "held")):
            monkeypatch.setattr(where, name, noted(getattr(where, name)), raising=False)
        with lanes.lane("push"):
            for gradient in sent:
                lanes.ask(lambda gradient=gradient: gradient.values.fill_(4.0))
            group.members[0].pusher.push(group.units[1], sent)
        assert found == [{4.0}] * 2
        assert set(group.layouts[0].mine.accumulator(group.units[1]).tolist()) == {4.0}


def test_an_owner_for_which_a_push_has_nothing_gets_nothing(deferred: list[DeferredLanes]) -> None:
    """Torch's adds refuse to add nothing. The gradient is shorter than the shards, which are padded."""
    with HeapGroup([[("w", 1, F32)]], 2, settings=Settings(timeout_s=60.0, accumulate="direct")) as group:
        group.publish_all()
        push(group, deferred[1], 1, 0, gradients(group.units[0], 2, 3.0, short=1))
        assert [layout.mine.accumulator(group.units[0]).tolist() for layout in group.layouts] == [[3.0], [0.0]]


def test_a_drain_waits_for_no_device_and_adds_what_all_sources_pushed_in_one_call(
    deferred: list[DeferredLanes], no_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HeapGroup(MATRICES, 4, by_hand=True) as group:
        group.publish_all()
        for member in (1, 2, 3):
            push(group, deferred[member], member, 0, gradients(group.units[0], 4, 10.0**member))
        push(group, deferred[1], 1, 1, gradients(group.units[1], 4, 3.0))
        added, before = asked(group, 0, "addition", monkeypatch), deferred[0].settled
        group.drain(0)
        assert added == [1, 1], "a quarter of a ring at a time, at least one block"
        assert deferred[0].settled == before
        assert set(group.layouts[0].mine.accumulator(group.units[0]).tolist()) == {1110.0}
        assert set(group.layouts[0].mine.accumulator(group.units[1]).tolist()) == {3.0}


def test_sources_at_different_units_are_added_in_one_call(
    deferred: list[DeferredLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with HeapGroup(MATRICES, 3, by_hand=True) as group:
        group.publish_all()
        push(group, deferred[1], 1, 0, gradients(group.units[0], 3, 1.0))
        push(group, deferred[2], 2, 1, gradients(group.units[1], 3, 2.0))
        added = asked(group, 0, "addition", monkeypatch)
        group.drain(0)
        assert added == [2]
        totals = [set(group.layouts[0].mine.accumulator(unit).tolist()) for unit in group.units]
        assert totals == [{1.0}, {2.0}]


@pytest.mark.parametrize("kept", [1024, 1])
def test_how_blocks_are_added_is_kept_by_their_headers_alone(
    deferred: list[DeferredLanes], monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """The same two sources, one of them, and both at another unit; then what they pushed first, with other values."""
    monkeypatch.setattr("odc.protocol.device._KEPT", kept)
    with HeapGroup(MATRICES, 3, by_hand=True) as group:
        group.publish_all()
        added = asked(group, 0, "addition", monkeypatch)
        expected = [0.0, 0.0]
        for turn in range(6):
            before = len(added)
            for sources, index in (((1, 2), 0), ((2,), 0), ((1, 2), 1), ((1,), 1)):
                for source in sources:
                    value = float(2 ** (2 * turn + source))
                    push(group, deferred[source], source, index, gradients(group.units[index], 3, value))
                    expected[index] += value
                for member in range(3):
                    group.drain(member)
                totals = [set(group.layouts[0].mine.accumulator(unit).tolist()) for unit in group.units]
                assert totals == [{value} for value in expected]
        assert len(added) - before == (0 if kept > 1 else 4), "of the last turn"


def test_of_blocks_that_never_come_again_only_so_many_are_kept(
    deferred: list[DeferredLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a layer of experts nearly every drain has other parts of the accumulator."""
    monkeypatch.setattr("odc.protocol.device._KEPT", 4)
    with HeapGroup([[(f"w{i}", 8, F32) for i in range(8)]], 2, by_hand=True) as group:
        group.publish_all()
        mover, parts = group.layouts[0].mover, list[weakref.ref[torch.Tensor]]()
        assert isinstance(mover, DeferredMover)
        addition = mover.addition

        def noted(totals: Sequence[torch.Tensor], values: Sequence[Sequence[torch.Tensor]]) -> Any:
            parts.extend(map(weakref.ref, totals))
            return addition(totals, values)

        monkeypatch.setattr(mover, "addition", noted)
        for first, end in itertools.combinations(range(9), 2):
            push(group, deferred[1], 1, 0, gradients(group.units[0], 2, 1.0)[first:end])
            group.drain(0)
        gc.collect()
        assert len(parts) == 36 and sum(part() is not None for part in parts) <= 4


def test_blocks_that_overlap_are_added_one_after_the_other(
    deferred: list[DeferredLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources that pushed two of four parameters cover a part of what another pushed, and of each other's."""
    with HeapGroup(MATRICES, 4, by_hand=True) as group:
        group.publish_all()
        push(group, deferred[1], 1, 0, gradients(group.units[0], 4, 1.0))
        push(group, deferred[2], 2, 0, gradients(group.units[0], 4, 2.0)[1:3])
        push(group, deferred[3], 3, 0, gradients(group.units[0], 4, 4.0)[2:])
        added = asked(group, 0, "addition", monkeypatch)
        group.drain(0)
        assert added == [1, 1, 1]
        push(group, deferred[1], 1, 0, gradients(group.units[0], 4, 8.0)[:2])
        group.drain(0)
        total = group.layouts[0].mine.accumulator(group.units[0]).view(4, 3000)
        assert [set(row.tolist()) for row in total] == [{9.0}, {11.0}, {7.0}, {5.0}]


def test_direct_adds_go_to_all_owners_in_one_call_without_a_lock(
    monkeypatch: pytest.MonkeyPatch, no_locks: None
) -> None:
    deferred = late_heaps(monkeypatch, atomic=True)
    with HeapGroup(MATRICES, 3, settings=Settings(accumulate="direct", timeout_s=60.0)) as group:
        group.publish_all()
        for member in range(3):
            before, calls = deferred[member].settled, asked(group, member, "accumulate_all", monkeypatch)
            push(group, deferred[member], member, 0, gradients(group.units[0], 3, 1.0 + member))
            assert deferred[member].settled - before == 2 and calls == [4]
        assert [set(layout.mine.accumulator(group.units[0]).tolist()) for layout in group.layouts] == [{6.0}] * 3


def test_without_atomic_adds_a_direct_push_takes_the_lock(deferred: list[DeferredLanes], no_locks: None) -> None:
    with HeapGroup(MATRICES, 2, settings=Settings(accumulate="direct", timeout_s=60.0)) as group:
        group.publish_all()
        with pytest.raises(AssertionError, match="a lock was taken"):
            push(group, deferred[0], 0, 0, gradients(group.units[0], 2, 1.0))


@pytest.mark.parametrize(("accumulate", "atomic"), [("server", False), ("direct", True)])
def test_kernels_are_made_ready_for_the_dtypes_of_all_units(
    monkeypatch: pytest.MonkeyPatch, accumulate: Any, atomic: bool
) -> None:
    """Where the heap is laid out, by the thread that trains: other threads then find what they launch."""
    late_heaps(monkeypatch, atomic=True)
    with HeapGroup([*MATRICES, [("s", 8, F32)]], 2, settings=Settings(accumulate=accumulate, timeout_s=60.0)) as group:
        for layout in group.layouts:
            device, dtypes, found = layout.mover.prepared  # type: ignore[attr-defined]
            assert device == layout.heap.device and found == atomic
            assert set(dtypes) == {(BF16, BF16, F32), (F32, F32, F32)}


def test_kernels_are_made_ready_in_every_lane_in_which_threads_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[object]()
    monkeypatch.setattr(
        DeferredMover, "prepare", lambda self, *asked: seen.append(self._lanes._here.name), raising=True
    )
    late_heaps(monkeypatch)
    with HeapGroup(MATRICES, 1, settings=Settings(timeout_s=60.0)):
        assert seen == ["fetch", "push", "server"]


def test_a_kernel_that_fails_leaves_the_root_to_torchs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the first one, which is tried before a mover is chosen: another, when kernels are made ready."""
    late_heaps(monkeypatch, atomic=True)
    choose = layout.mover_for

    def prepare(self: DeferredMover, device: object, dtypes: object, atomic: bool) -> None:
        if self.atomic:
            raise RuntimeError("ptxas: out of registers")
        assert not atomic, "torch adds nothing atomically"

    def mover(settings: Settings, device: torch.device, own: int) -> DeferredMover:
        made = choose(settings, device, own)
        made.atomic = settings.kernels != "torch"
        return made

    monkeypatch.setattr(DeferredMover, "prepare", prepare)
    monkeypatch.setattr(layout, "mover_for", mover)
    monkeypatch.setattr(choice, "mover_for", mover)
    with HeapGroup(MATRICES, 2, settings=Settings(accumulate="direct", timeout_s=60.0)) as group:
        for one in group.layouts:
            assert not one.mover.atomic  # type: ignore[attr-defined]
            assert not one.heap.adds_atomically, "peers add under a lock as well"
    assert caplog.text.count("torch's take their place: RuntimeError: ptxas: out of registers") == 2, "of each root"
    with pytest.raises(RuntimeError, match="ptxas"):
        HeapGroup(MATRICES, 1, settings=Settings(kernels="triton", timeout_s=60.0))


def test_over_links_without_atomics_direct_adds_are_plain_ones_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a mover whose own adds would be atomic."""
    deferred = late_heaps(monkeypatch, atomic=True)
    with HeapGroup(MATRICES, 2, settings=Settings(accumulate="direct", timeout_s=60.0)) as group:
        group.publish_all()
        for layout in group.layouts:
            assert layout.heap.adds_atomically, "what the mover can"
            layout.heap.adds_atomically = False
        for member in range(2):
            atomic, plain = (asked(group, member, name, monkeypatch) for name in ("accumulate_all", "add"))
            push(group, deferred[member], member, 0, gradients(group.units[0], 2, 1.0 + member))
            assert atomic == [] and plain == [4, 4]
        assert [set(layout.mine.accumulator(group.units[0]).tolist()) for layout in group.layouts] == [{3.0}] * 2


@pytest.mark.parametrize("short", [0, 3])
def test_several_dtypes_and_short_gradients_arrive_whole(deferred: list[DeferredLanes], short: int) -> None:
    """Four runs through two slots: the pusher announces what it has posted before it waits for a slot."""
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


UNEVEN = [[("norm", 40, BF16), ("w", 3000, BF16), ("v", 3000, BF16), ("head", 11_000, BF16), ("b", 8, F32)]]


@pytest.mark.parametrize("dtype", [BF16, F64])
@pytest.mark.parametrize("short", [0, 700])
def test_a_unit_goes_through_slots_that_do_not_hold_it(
    deferred: list[DeferredLanes], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, short: int
) -> None:
    """Whole gradients side by side where a slot holds them, and one that it does not hold part by part."""
    monkeypatch.setattr(regions, "STAGING_BYTES", 2 * 2 * 8192)
    with HeapGroup(UNEVEN, 3) as group:
        (unit,) = group.units
        ring = group.layouts[0].ring
        assert (ring.slots, ring.slot_bytes) == (2, 8192) and unit.pushed_bytes > 4 * ring.slot_bytes
        group.publish_all()
        draw = torch.Generator().manual_seed(0)
        pushed: list[list[Gradient]] = []
        expected = torch.zeros(3, unit.numel)
        for _ in range(3):
            pushed.append([])
            for i, spec in enumerate(unit.params):
                whole = torch.randint(-9, 9, (3, spec.numel), generator=draw).float()
                numel = 3 * spec.numel - min(short, spec.numel)
                whole.view(-1)[numel:] = 0.0
                expected[:, spec.accumulator_offset : spec.accumulator_offset + spec.numel] += whole
                pushed[-1].append(Gradient(i, whole.view(-1)[:numel].to(dtype)))
        for member in range(3):
            push(group, deferred[member], member, 0, pushed[member])
        for endpoint in group.members:
            endpoint.done(Outcome.TRAINED)
        for owner, endpoint in enumerate(group.members):
            endpoint.protocol.await_done(1)
            endpoint.protocol.await_accumulated()
            assert torch.equal(group.layouts[owner].mine.accumulator(unit), expected[owner]), owner
            blocks = group.layouts[owner].mine.sent.load((owner + 1) % 3)
            assert blocks >= 5, "several blocks a unit"


def test_owners_get_the_parts_of_a_gradient_in_turn(
    deferred: list[DeferredLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All owners add at the same time; and a pusher that has filled every slot has announced them all."""
    monkeypatch.setattr(regions, "STAGING_BYTES", 2 * 2 * 8192)
    with HeapGroup([[("w", 5 * 4096, BF16)]], 3, by_hand=True, settings=Settings(timeout_s=0.5)) as group:
        group.publish_all()
        before = deferred[0].settled
        with pytest.raises(WaitTimeoutError, match="rank 13"):
            push(group, deferred[0], 0, 0, gradients(group.units[0], 3, 1.0))
        assert [group.layouts[owner].mine.sent.load(0) for owner in (1, 2)] == [2, 2]
        assert deferred[0].settled - before == 2, "for the gradients; one wait for four blocks"


def test_what_was_worked_out_for_few_sets_of_gradients_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer of experts nearly every push has gradients of others."""
    monkeypatch.setattr(device, "_KEPT", 2)
    unit = UnitSpec.build(0, "experts", [(f"w{i}", 4, F32) for i in range(4)], F32)
    route: Any = device.DeviceRoute.__new__(device.DeviceRoute)
    route._kept, route._others = {}, []
    for params in itertools.combinations(range(4), 2):
        gradients = [Gradient(param, torch.zeros(4)) for param in params]
        found = [run for run, _ in route._runs_of(unit, gradients)]
        assert found == [run for run, _ in route._runs_of(unit, gradients)] and len(route._kept) <= 2
