"""Which way `changes="auto"` has a shard read: what is measured of links, of packing and of patches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.changing import Weights, two_hosts
from support.members import BF16, HeapGroup
from support.spread import HOSTS, Copies

from odc.hosts.changes import _Tally
from odc.movers import changes, cpu
from odc.protocol import HeapLayout
from odc.protocol.changes import PROBE_EVERY, SAMPLE_EVERY, WHOLE
from odc.protocol.words import VersionWord
from odc.settings import Settings

#: Whether shards lie on a device, which does its work late and packs as `support.change_tiles` does.
on_devices = pytest.mark.parametrize("late", [False, True], ids=["cpu", "device"])


class Pace:
    """A link of which a read of a byte takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, nbytes: int) -> float:
        return nbytes * self.seconds


@pytest.mark.parametrize(("seconds", "packed"), [(0.0, False), (1e-15, False), (1.0, True)])
def test_changes_are_packed_where_the_link_is_slower(seconds: float, packed: bool) -> None:
    weights = Weights()
    with two_hosts(changes="auto") as spread:
        for member in spread.group.members:
            member.shards._changes._seconds = Pace(seconds)  # type: ignore[union-attr]
        for step in range(4):
            weights.publish(spread)
            weights.step(1e-5, step)
        versions = spread.group.layouts[0].mine.versions(spread.group.units[0])
        assert (versions.load(VersionWord.PACKED) != WHOLE) == packed


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Packing takes 10 us a call and 1 ns a byte; the bytes of each call."""
    sizes, pack = list[int](), changes.pack

    def counted(old: torch.Tensor, new: torch.Tensor, into: torch.Tensor) -> int:
        sizes.append(new.numel())
        return pack(old, new, into)

    def clock() -> float:
        return len(sizes) * 1e-5 + sum(sizes) * 1e-9

    monkeypatch.setattr(changes, "pack", counted)
    monkeypatch.setattr("odc.protocol.changes.time", SimpleNamespace(thread_time=clock))
    return sizes


def published_by(group: HeapGroup, shards: list[list[torch.Tensor]], lr: float = 1e-5) -> list[bool]:
    """Publish an optimizer's next step; returns whether each unit is read whole."""
    generator = torch.Generator().manual_seed(group.members[0].protocol.epoch)
    for shard in (shard for tensors in shards for shard in tensors):
        shard -= lr * torch.randn(len(shard), generator=generator).clamp(-1, 1)
    group.members[0].shards.publish(shards, [False] * len(shards))
    versions = [group.layouts[0].mine.versions(unit) for unit in group.units]
    return [words.load(VersionWord.PACKED) == WHOLE for words in versions]


@contextmanager
def published_alone(units: int, numel: int, seconds: float) -> Iterator[tuple[HeapGroup, list[list[torch.Tensor]]]]:
    """A group under "auto" whose link takes `seconds` a byte, and shards of its first member, a parameter a unit."""
    layout = [[("w", numel, BF16)] for _ in range(units)]
    with HeapGroup(layout, 4, settings=Settings(timeout_s=60.0, changes="auto"), hosts=HOSTS) as group:
        group.members[0].shards._changes._seconds = Pace(seconds)  # type: ignore[union-attr]
        generator = torch.Generator().manual_seed(0)
        yield group, [[torch.randn(numel, generator=generator) * 0.02] for _ in range(units)]


def test_a_link_that_was_slow_once_is_measured_anew(monkeypatch: pytest.MonkeyPatch, packing: list[int]) -> None:
    """Where changes cross, reads are too short to say anything of a link."""
    monkeypatch.setattr("support.changing.LAYOUT", [[("w", 600_000, BF16)]])
    clock = [0.0]
    monkeypatch.setattr("odc.hosts.changes.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    read = Copies.read

    def timed(engine: Copies, rank: int, region: str, offset: int, into: torch.Tensor, **options: Any) -> None:
        clock[0] += into.numel() * 1e-10
        read(engine, rank, region, offset, into, **options)

    monkeypatch.setattr(Copies, "read", timed)
    weights, packed = Weights(), list[bool]()
    with two_hosts(changes="auto") as spread:
        unit = spread.group.units[0]
        for layout in spread.group.layouts:
            layout.settings = dataclasses.replace(layout.settings, check_protocol=False)
        versions = spread.group.layouts[0].mine.versions(unit)
        for step in range(130):
            weights.publish(spread)
            packed.append(versions.load(VersionWord.PACKED) != WHOLE)
            for me, cache in enumerate(spread.caches):
                cache.reads.bring([(spread.group.layouts[me].share((me + 2) % 4), unit)], step + 1)
                if step == 0:
                    cache.reads._paces = {0: 2e-8}
            weights.step(1e-5, step, units=(0,))
    assert all(packed[1:64]) and not any(packed[-20:])


def test_two_reads_in_progress_are_no_slower_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large shards: each of two that share the link takes twice as long as alone."""
    clock, bytes_s = [0.0], 1e-9
    monkeypatch.setattr("odc.hosts.changes.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr("support.changing.LAYOUT", [[("w", 600_000, BF16)]])
    with two_hosts(changes="auto") as spread:
        reads, (unit,) = spread.caches[0].reads, spread.group.units
        alone, tally = unit.published_bytes * bytes_s, _Tally()
        begun = [0.0, 0.0]
        for i in range(8):
            clock[0] = alone * 2 * (i // 2 + 1)  # two at a time come together, and the next two begin
            reads._note_read(unit, 1, begun.pop(0), tally)
            begun.append(clock[0])
    assert alone <= reads.seconds(unit.published_bytes) <= 1.25 * alone


@pytest.mark.parametrize("remote", [False, True])
def test_a_copy_within_the_machine_says_nothing_of_the_link(remote: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With replicas, some members of other nodes are on this host."""
    with two_hosts(changes="auto") as spread:
        tally, layout, unit = _Tally(), spread.group.layouts[0], spread.group.units[0]
        monkeypatch.setattr(type(layout.grid), "is_remote", lambda grid, member: remote)
        spread.caches[0].reads._whole(layout.share(2), unit, 1, tally).then()
    assert tally.shards == remote


@on_devices
def test_a_slow_link_is_measured_once_in_a_while(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an epoch of which all units are read whole."""
    monkeypatch.setattr("support.changing.LAYOUT", [[("w", 4000, BF16)], [("v", 4000, BF16)]])
    weights, wholes = Weights(), list[bool]()
    with two_hosts(late, changes="auto") as spread:
        for member in spread.group.members:
            versioned: Any = member.shards._changes
            versioned._seconds, versioned._times = Pace(1.0), SimpleNamespace(seconds=Pace(1.0), patching=Pace(0.0))
        versions = [spread.group.layouts[0].mine.versions(unit) for unit in spread.group.units]
        for step in range(2 * PROBE_EVERY + 1):
            weights.publish(spread)
            found = {words.load(VersionWord.PACKED) == WHOLE for words in versions}
            assert len(found) == 1
            wholes += found
            weights.step(1e-5, step, units=(0, 1))
    assert [step for step, whole in enumerate(wholes) if whole] == [0, PROBE_EVERY, 2 * PROBE_EVERY]


def test_shards_that_are_read_whole_are_written_once(packing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those of which a sample is taken."""
    with published_alone(8, 40_000, 1e-12) as (group, shards):
        scratch, written = group.members[0].shards._changes._scratch, list[int]()  # type: ignore[union-attr]
        mover, begin = group.layouts[0].mover, scratch.data_ptr()

        def publish(places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
            written.extend(one.nbytes for one in places if begin <= one.data_ptr() < begin + scratch.nbytes)
            cpu.publish(places, sources)

        monkeypatch.setattr(group.layouts[0], "mover", SimpleNamespace(**{**vars(mover), "publish": publish}))
        for _ in range(2):
            published_by(group, shards)
        written.clear()
        for _ in range(16):
            assert all(published_by(group, shards))
        assert sum(written) == 16 * 80_000 == 16 * 8 * 80_000 / SAMPLE_EVERY
        before = [one.load(VersionWord.CHANGED) for one in map(group.layouts[0].mine.versions, group.units)]
        group.members[0].shards.publish(shards, [False] * 8)
        after = [one.load(VersionWord.CHANGED) for one in map(group.layouts[0].mine.versions, group.units)]
        assert before == after, "what has not changed is found"


def test_a_unit_that_has_a_nan_and_does_not_change_is_not_read_again(packing: list[int]) -> None:
    with published_alone(1, 40_000, 1e-12) as (group, shards):
        shards[0][0][5] = torch.nan
        changed = group.layouts[0].mine.versions(group.units[0])
        for _ in range(2):
            published_by(group, shards)
        before = changed.load(VersionWord.CHANGED)
        for _ in range(3):
            group.members[0].shards.publish(shards, [False])
        assert changed.load(VersionWord.CHANGED) == before


def test_every_unit_is_sampled_whatever_the_rhythm_of_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each step is evaluated before the next one; what a sample takes of a shard moves on."""
    sampled, pack = dict[int, list[tuple[int, int]]](), changes.pack
    with published_alone(8, 1 << 18, 1e-12) as (group, shards):
        owners = [group.layouts[0].mine.published_bytes(unit, 1).data_ptr() for unit in group.units]

        def placed(old: torch.Tensor, new: torch.Tensor, into: torch.Tensor) -> int:
            unit = max(range(8), key=lambda one: (owners[one] <= old.data_ptr(), owners[one]))
            sampled.setdefault(unit, []).append((len(steps), old.data_ptr() - owners[unit]))
            return pack(old, new, into)

        monkeypatch.setattr(changes, "pack", placed)
        steps = list[bool]()
        for _ in range(40):
            steps += published_by(group, shards)[:1]
            group.members[0].shards.publish(shards, [False] * 8)
    assert sorted(sampled) == list(range(8))
    for found in sampled.values():
        when, places = zip(*found, strict=True)
        assert all(later - one <= SAMPLE_EVERY for one, later in itertools.pairwise((*when, 40)))
        assert len({*places}) == 2, "of 512 KiB"


@pytest.mark.parametrize(("link", "packed"), [(2e-9, True), (0.8e-9, False)])
def test_what_the_first_call_after_a_step_takes_is_of_no_byte(
    link: float, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured: 0.13 ms more, and 0.3 s/GB. With it a sample of 256 KiB would seem to take 0.8. Of a link as fast as
    2.7 times packing, compute hides too much for changes to pay.
    """
    calls, clock, pack = [0], [0.0], changes.pack

    def timed(old: torch.Tensor, new: torch.Tensor, into: torch.Tensor) -> int:
        clock[0] += new.numel() * 0.3e-9 + (0 if calls[0] else 1.3e-4)
        calls[0] += 1
        return pack(old, new, into)

    monkeypatch.setattr(changes, "pack", timed)
    monkeypatch.setattr("odc.protocol.changes.time", SimpleNamespace(thread_time=lambda: clock[0]))
    with published_alone(1, 1 << 20, link) as (group, shards):
        wholes = list[bool]()
        for _ in range(6):
            wholes += published_by(group, shards)
            calls[0] = 0
    assert wholes == [True, *[not packed] * 5]


def test_what_a_small_unit_takes_says_nothing_of_large_ones(packing: list[int]) -> None:
    weights = Weights()
    with two_hosts(changes="auto") as spread:
        for member in spread.group.members:
            member.shards._changes._seconds = Pace(1e-8)  # type: ignore[union-attr]
        for step in range(4):
            weights.publish(spread)
            weights.step(1e-5, step)
        units = spread.group.units
        assert set(packing) == {unit.published_bytes for unit in units}, "none is larger than a sample"
        packed = [spread.group.layouts[0].mine.versions(unit).load(VersionWord.PACKED) for unit in units]
        assert packed[0] != WHOLE and packed[1] != WHOLE


@pytest.mark.parametrize(("seconds", "packed"), [(1e-9, False), (1e-7, True)])
def test_where_all_units_are_small_they_say_what_packing_takes(
    seconds: float, packed: bool, packing: list[int]
) -> None:
    values = torch.randn(4000)
    with HeapGroup([[("w", 4000, BF16)]], 4, settings=Settings(timeout_s=60.0, changes="auto"), hosts=HOSTS) as group:
        shards = group.members[0].shards
        shards._changes._seconds = Pace(seconds)  # type: ignore[union-attr]
        for _ in range(3):
            shards.publish([[values]], [False])
            values[::500] += 1
        versions = group.layouts[0].mine.versions(group.units[0])
        assert packing and (versions.load(VersionWord.PACKED) != WHOLE) == packed


def test_what_a_patch_takes_is_measured_as_it_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, paces, clock = Weights(), list[float](), [0.0]

    def pass_by(seconds: float = 1e-4) -> float:
        clock[0] += seconds
        return clock[0]

    monkeypatch.setattr("odc.hosts.changes.time", SimpleNamespace(perf_counter=pass_by))
    with two_hosts(True) as spread:
        reads, patch = spread.caches[0].reads, HeapLayout.patch
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("odc.hosts.changes._TIMED_BYTES", 1)
            patched.setattr(HeapLayout, "patch", lambda *args: (pass_by(0.5), patch(*args))[1])
            for step in range(2):
                assert reads.patching(0) == 0.0
                weights.publish(spread)
                weights.expect(spread, 0, 0)
                weights.step(1e-5, step)
                paces.append(reads.seconds(1))
        assert reads.patching(0) == pytest.approx(0.5, abs=0.01) and not reads.patching(1)
        assert paces[0] == paces[1] > 0, "of a link nothing is learned while patches take most of the time"
        weights.publish(spread)
        weights.expect(spread, 0, 0)
        assert reads.patching(0) < 0.5, "one that is faster counts at once"
