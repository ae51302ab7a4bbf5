"""Changes of shards on a device: when they are packed and read, what is waited for, and where kernels do not work."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from support import members
from support.changing import LAYOUT, WHOLE_BYTES, Weights, crossed, two_hosts
from support.deferred import DeferredLanes, DeferredMover, late_heaps
from support.spread import Spread

from odc.errors import UnsupportedError
from odc.movers import changes
from odc.protocol import Word, regions
from odc.protocol.changes import WHOLE
from odc.protocol.units import UnitSpec
from odc.protocol.words import VersionWord


class Times(NamedTuple):
    """As `ReadTimes`."""

    second_a_byte: float
    applied: float

    def seconds(self, nbytes: int) -> float:
        return nbytes * self.second_a_byte

    def patching(self, unit: int) -> float:
        return self.applied


@pytest.mark.parametrize(
    ("times", "read"),
    [
        (Times(0.0, 0.0), [False] * 9),  # nothing is known of the link
        (Times(1.0, 0.0), [True] * 9),
        (Times(1.0, 1.1 * WHOLE_BYTES), [False] * 7 + [True, False]),  # what it takes is measured again
    ],
)
def test_on_a_device_changes_are_read_where_that_and_a_patch_are_faster(times: Times, read: list[bool]) -> None:
    """By what this rank has measured of its own reads."""
    weights, found = Weights(), list[bool]()
    with two_hosts(True, changes="auto") as spread:
        for member in spread.group.members:
            member.shards._changes._times = times  # type: ignore[union-attr]
        versions = spread.group.layouts[0].mine.versions(spread.group.units[0])
        for step in range(10):
            weights.publish(spread)
            weights.expect(spread, 0, 0)
            weights.step(1e-5, step)
            found.append(versions.load(VersionWord.PACKED) != WHOLE)
    assert found == [False, *read]


def test_the_sizes_are_copied_in_the_turn_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mover is given addresses alone, and another device may be the current one."""
    current, copied, put = list[int](), list[tuple[int, list[int]]](), DeferredMover.put

    @contextlib.contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor.data_ptr())
        yield
        current.pop()

    def noted(mover: DeferredMover, address: int, source: int, nbytes: int) -> None:
        copied.append((source, [*current]))
        put(mover, address, source, nbytes)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(DeferredMover, "put", noted)
    with two_hosts(True, changes="on") as spread:
        Weights().publish(spread)
        found = [member.shards._changes._found.data_ptr() for member in spread.group.members]  # type: ignore[union-attr]
        assert copied == [(one, [one]) for one in found]


def test_on_a_device_without_kernels_auto_reads_whole_shards(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also those of ranks that pack: the layout of the heaps is the same, whatever moves data on a rank."""
    weights, packs = Weights(), [False, False, True, True]
    with two_hosts(True, changes="auto") as spread:
        for layout, some in zip(spread.group.layouts, packs, strict=True):
            layout.applies_changes = some
        for member in spread.group.members:
            member.shards._changes._times = Times(1.0, 0.0)  # type: ignore[union-attr]
        for step in range(3):
            weights.publish(spread)
            for me, layout in enumerate(spread.group.layouts):
                weights.expect(spread, me, 0)
                assert (layout.mine.versions(spread.group.units[0]).load(VersionWord.PACKED) != WHOLE) == (
                    bool(step) and packs[me]
                )
            assert crossed(spread) == 4 * WHOLE_BYTES, "none can apply what others pack, or packs for others"
            weights.step(1e-5, step)

    def fails(*unused: object) -> None:
        raise RuntimeError("no such instruction")

    caplog.clear()
    for name, value, warnings in (("packs", False, 0), ("pack", fails, 4)):
        with monkeypatch.context() as patch:
            patch.setattr(DeferredMover, name, value)
            with two_hosts(True, changes="auto") as spread:
                assert spread.group.layouts[0].says_changes and not spread.group.layouts[0].applies_changes
        assert len(caplog.records) == warnings
    assert "shards are read whole, as none is packed on cpu: no such instruction" in caplog.text


def test_on_a_device_only_pairs_of_dtypes_that_occur_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels convert nothing to bytes, as of a frozen parameter in 8 bits, which are published as they are."""
    tried, pack = set[tuple[torch.dtype, torch.dtype]](), DeferredMover.pack

    def note(self: DeferredMover, units: Any, found: torch.Tensor) -> None:
        for places, _, shards, _ in units:
            tried.update((shard.dtype, place.dtype) for place, shard in zip(places, shards, strict=True))
        pack(self, units, found)

    monkeypatch.setattr(DeferredMover, "pack", note)
    params = [("w", 8, torch.bfloat16), ("b", 8, torch.bfloat16), ("q", 8, torch.uint8)]
    unit = UnitSpec.build(0, "u", params, torch.float32, {"q"}, own={"w": torch.float32, "q": torch.uint8})
    late_heaps(monkeypatch)
    monkeypatch.setattr(members, "units_of", lambda *_: [unit])
    spread = Spread(layout=[params], changes="on")
    spread.close()
    own = {(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.uint8, torch.uint8)}
    assert tried == own


@pytest.mark.parametrize("second_buffer", [False, True])
def test_on_a_device_publishing_waits_once_for_shards_and_sizes_and_a_patch_once(second_buffer: bool) -> None:
    """Without changes it waits once, too."""
    weights, waits = Weights(), dict[str, list[int]]()
    for how in ("on", "auto", "off"):
        with two_hosts(True, changes=how, second_buffer=second_buffer) as spread:
            layout = spread.group.layouts[0]
            lanes = layout.heap.lanes
            assert isinstance(lanes, DeferredLanes)
            waits[how] = []
            for step in range(3):
                before = lanes.settled
                spread.group.members[0].shards.publish(weights.of[0], [False] * len(LAYOUT))
                waits[how].append(lanes.settled - before)
                for member in (1, 2, 3):
                    spread.group.members[member].shards.publish(weights.of[member], [False] * len(LAYOUT))
                spread.mirror(Word.PUBLISHED)
                before = lanes.settled
                weights.expect(spread, 0, 0)
                if step and how == "on":
                    assert lanes.settled - before == 2 + 1, "a patch each of two shards, and the test's"
                weights.step(1e-5, step)
    assert waits == {key: [1, 1, 1] for key in ("on", "auto", "off")}


@pytest.mark.parametrize("skipped", ["HeapLayout.patch", "PublishedShards.publish"])
def test_each_wait_for_the_device_is_needed(skipped: str) -> None:
    weights = Weights()
    with two_hosts(True) as spread:
        for layout in spread.group.layouts:
            layout.settings = dataclasses.replace(layout.settings, check_protocol=False)
        for step in range(2):
            weights.publish(spread)
            weights.expect(spread, 0, 0)
            weights.step(1e-5, step)
        for layout in spread.group.layouts:
            lanes = layout.heap.lanes
            assert isinstance(lanes, DeferredLanes)
            lanes.skipped = frozenset({skipped})
        weights.publish(spread)
        with pytest.raises((AssertionError, IndexError, RuntimeError)):
            weights.expect(spread, 0, 0)


@pytest.mark.parametrize("only_into_own", [False, True])
def test_on_a_device_changes_come_into_a_landing_at_once(monkeypatch: pytest.MonkeyPatch, only_into_own: bool) -> None:
    """Which is as large as the largest of them; whole shards come through it part by part where they must."""
    monkeypatch.setattr(regions, "_LANDING_BYTES", 1024)
    weights = Weights()
    with two_hosts(True, only_into_own=only_into_own) as spread:
        layout = spread.group.layouts[0]
        assert layout.landing_bytes == changes.room_for(120_000)
        engine, into = spread.engines[0], list[torch.Tensor]()
        read = engine.read

        def note(rank: int, region: str, offset: int, memory: torch.Tensor, **options: Any) -> None:
            into.append(memory)
            read(rank, region, offset, memory, **options)

        engine.read = note  # type: ignore[method-assign]
        for step in range(3):
            weights.publish(spread)
            into.clear()
            weights.expect(spread, 0, 0)
            if step:
                landings = {layout.landing(i).data_ptr() for i in range(2)}
                assert {one.data_ptr() for one in into} == landings and len(into) == 2, "of two owners"
            weights.step(1e-5, step)
    with two_hosts(True, changes="off") as spread:
        assert not spread.group.layouts[0].says_changes and spread.group.layouts[0].landing_bytes == 1024


def test_on_a_device_without_kernels_changes_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeferredMover, "packs", False)
    late_heaps(monkeypatch)
    with pytest.raises(UnsupportedError, match=r"Settings\(changes='on'\) packs on cpu by odc's kernels"):
        Spread(changes="on")
