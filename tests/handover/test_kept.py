"""Readers on another host that read what has changed: the same bits, fewer bytes, and no torn or mixed versions."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from support.deferred import late_heaps
from support.extent import up_to
from support.far_readers import LAYOUT, UNITS, Copying, Weights, far_reader
from support.handover_jobs import Job, read_in_a_loop
from support.members import BF16

from odc.errors import OdcError, StaleVersionError
from odc.handover import Reader, read_groups
from odc.protocol.words import VERSIONS_KEPT, VersionWord
from odc.settings import Settings

WHOLE = 2 * sum(UNITS)  # bytes of both members


def packing(**options: object) -> Job:
    return Job(LAYOUT, settings=Settings(timeout_s=60.0, changes="on", **options))  # type: ignore[arg-type]


@pytest.fixture(params=["in CPU memory", "on a device"])
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    if request.param == "on a device":
        late_heaps(monkeypatch)
    with packing() as job:
        for layout in job.group.layouts:  # checksums, but not the checks of words: no member is DONE here
            layout.settings = dataclasses.replace(layout.settings, check_protocol=True)
        yield job


def matches(found: dict[str, torch.Tensor], weights: Weights, version: int) -> bool:
    expected = weights.expected(version)
    return all(torch.equal(one.view(torch.uint8), expected[name].view(torch.uint8)) for name, one in found.items())


def expect(reader: Reader, weights: Weights, version: int) -> None:
    number, tensors = reader.read()
    assert number == version and len(tensors) == 3 and matches(tensors, weights, version)


def test_only_changes_cross_after_the_first_time_and_nothing_of_what_has_not_changed(job: Job) -> None:
    weights = Weights()
    with far_reader(job) as (reader, engine):
        for version in range(1, 11):
            weights.publish(job, version)
            expect(reader, weights, version)
            nbytes = engine.taken()
            if version == 1:
                assert nbytes >= WHOLE
            elif version == 7:
                assert 24_000 < nbytes < 25_000, "all of unit 0 has changed, and the biases"
            else:
                assert 0 < nbytes < 0.05 * WHOLE


def test_nothing_crosses_again_while_nothing_has_changed(job: Job) -> None:
    weights = Weights()
    with far_reader(job) as (reader, engine):
        weights.publish(job, 1)
        expect(reader, weights, 1)
        engine.taken()
        expect(reader, weights, 1)
        for _ in range(3):
            weights.publish(job, 1)
        assert reader.read().version == 4 and engine.taken() == 0
        weights.publish(job, 2)
        number, tensors = reader.read()
        assert number == 5 and matches(tensors, weights, 2) and 0 < engine.taken() < 0.05 * WHOLE


@pytest.mark.parametrize("skipped", range(VERSIONS_KEPT + 2))
def test_a_reader_that_skips_versions_reads_the_changes_of_those_that_are_kept(job: Job, skipped: int) -> None:
    weights = Weights()
    with far_reader(job) as (reader, engine):
        weights.publish(job, 8)
        assert reader.read().version == 1
        engine.taken()
        for version in range(9, 10 + skipped):  # 14 would change all of unit 0
            weights.publish(job, version)
        number, tensors = reader.read()
        assert number == 2 + skipped and matches(tensors, weights, 9 + skipped)
        nbytes = engine.taken()
        assert nbytes < 0.1 * WHOLE if skipped < VERSIONS_KEPT else nbytes > 24_000


def test_changes_that_have_been_written_over_are_not_read(job: Job) -> None:
    """Of a unit of which nearly half changes each time, one version fits."""
    generator = torch.Generator().manual_seed(1)
    shards = [[torch.randn(numel, generator=generator) for _, numel, _ in unit] for unit in LAYOUT]
    with far_reader(job) as (reader, engine):
        for step in range(12):
            for member in range(2):
                job.group.members[member].shards.publish(shards, [False] * len(LAYOUT))
            if step % 3 != 1:  # so one version lies between some reads, none between others
                found = reader.read().tensors["u0.w"]
                assert torch.equal(found, torch.cat([shards[0][0]] * 2)[:-1].to(BF16))
                whole = engine.taken() > 20_000
                assert whole == (step % 3 == 2 or step == 0)
            shards[0][0][step % 2 :: 3] *= -1.5


def test_changes_lead_from_one_buffer_to_the_other() -> None:
    weights = Weights()
    with packing(second_buffer=True) as job, far_reader(job) as (reader, engine):
        for version in range(1, 6):
            weights.publish(job, version)
            expect(reader, weights, version)
            assert (engine.taken() < 0.05 * WHOLE) == (version > 1)


def test_the_tensors_of_the_caller_may_have_been_changed_and_be_of_any_kind(job: Job) -> None:
    weights = Weights()
    into = {"u0.w": torch.zeros(11_999, 2)[:, 0], "u1.v": torch.zeros(5999, dtype=torch.float64)}
    with far_reader(job) as (reader, engine):
        for version in range(1, 4):
            weights.publish(job, version)
            reader.read(into)
            expected = weights.expected(version)
            assert all(torch.equal(tensor, expected[name].to(tensor.dtype)) for name, tensor in into.items())
            assert version == 1 or engine.taken() < 0.05 * WHOLE
            engine.taken()
            into["u1.v"].zero_()


def test_parts_of_a_unit_may_be_read_in_turns(job: Job) -> None:
    weights = Weights()
    parts = [{"u0.w": torch.zeros(11_999, dtype=BF16)}, {"u0.b": torch.zeros(9, dtype=BF16)}]
    with far_reader(job) as (reader, engine):
        for version in range(1, 6):
            for turn, into in enumerate(parts):
                weights.publish(job, 2 * version + turn - 1)
                number, tensors = reader.read(into)
                assert matches(tensors, weights, number)
            assert engine.taken() < UNITS[0] or version == 1 or version == 4, "of version 7 all has changed"


def test_one_owner_on_this_host_and_one_on_another(job: Job) -> None:
    weights = Weights()
    with far_reader(job, near=(0,)) as (reader, engine):
        for version in range(1, 4):
            weights.publish(job, version)
            expect(reader, weights, version)
            assert (engine.taken() < 0.05 * WHOLE) == (version > 1)


def test_a_reader_keeps_nothing_on_demand_or_where_the_job_packs_nothing(job: Job) -> None:
    weights = Weights()
    with Job(LAYOUT) as plain:
        for one, options in ((job, {"changes": False}), (plain, {})):
            with far_reader(one, **options) as (reader, engine):
                for version in (1, 2):
                    weights.publish(one, version)
                    expect(reader, weights, version)
                    assert engine.taken() >= WHOLE - 12


def test_a_copy_that_is_not_what_was_published_is_noticed_where_the_protocol_is_checked(job: Job) -> None:
    weights = Weights()
    with far_reader(job) as (reader, _):
        weights.publish(job, 1)
        reader.read()
        weights.publish(job, 2)
        layout = job.group.layouts[1]
        layout.mine.versions(job.group.units[0]).store(VersionWord.CHECKSUM, 1)
        with pytest.raises(OdcError, match="by its changes, unit 0 of version 2 is not what rank 13 has published"):
            reader.read()
        layout.mine.versions(job.group.units[0]).store(VersionWord.CHECKSUM, 0)
        expect(reader, weights, 2)


def test_a_look_that_asks_two_members_comes_half_as_often(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whether a first copy is overtaken: a look before it, one after it, and those between."""
    looked, overtaken, weights = list[int](), Reader._overtaken, Weights()
    monkeypatch.setattr(Reader, "_overtaken", lambda self, over: (looked.append(over), overtaken(self, over))[1])
    weights.publish(job, 1)
    for nbytes, looks in ((2 * WHOLE // 3, 2), (WHOLE // 6, 4)):
        for constant in ("reader._LOOK_BYTES", "kept._CHECK_BYTES"):
            monkeypatch.setattr(f"odc.handover.{constant}", nbytes)
        for changes in (True, False):
            looked.clear()
            with far_reader(job, changes=changes) as (reader, _):
                expect(reader, weights, 1)
            assert len(looked) == looks


# the sequence lock ---------------------------------------------------------------------------------------------------


class Interleaved:
    """Publishers that go on by a schedule, one write at a time, in the middle of every read and every pause."""

    def __init__(self, job: Job, weights: Weights, schedule: list[int]) -> None:
        self.publishers = [weights.publishing(job, member) for member in range(2)]
        self.schedule, self.at, self.turn = schedule, 0, 0

    def go_on(self) -> None:
        for _ in range(self.schedule[self.at % len(self.schedule)]):
            self.step()
        self.at += 1

    def step(self, seconds: float = 0.0) -> None:
        self.turn = 1 - self.turn
        next(self.publishers[self.turn])


@contextmanager
def interleaved(schedule: list[int], buffers: int = 1, **options: int) -> Iterator[tuple[Reader, Weights, Copying]]:
    weights, patch = Weights(), pytest.MonkeyPatch()
    with (
        packing(second_buffer=buffers == 2) as job,
        far_reader(job, **options) as (reader, engine),
        patch.context() as patch,
    ):
        steps = Interleaved(job, weights, schedule)
        patch.setattr("odc.deadlines.time", SimpleNamespace(monotonic=time.monotonic, sleep=steps.step))
        engine.meanwhile = steps.go_on
        yield reader, weights, engine


def of_its_version(weights: Weights) -> Callable[[int, dict[str, torch.Tensor]], None]:
    def check(version: int, tensors: dict[str, torch.Tensor]) -> None:
        assert matches(tensors, weights, version), f"version {version}"

    return check


def many(test: Callable[..., None]) -> Callable[..., None]:
    patient = examples(max_examples=up_to(60), deadline=None)
    return patient(given(schedule=st.lists(st.integers(0, 9), min_size=1, max_size=24))(test))


@pytest.mark.parametrize("buffers", [1, 2])
@many
def test_no_copy_is_torn_however_writes_and_reads_interleave(buffers: int, schedule: list[int]) -> None:
    with interleaved(schedule, buffers, tries=3) as (reader, weights, _):
        good, stale = read_in_a_loop(reader, 6, of_its_version(weights))
    assert good + stale == 6


BUSY = [0, 2, 1, 0, 3, 0, 0, 4]


def test_the_schedules_do_tear_an_unchecked_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    with interleaved(BUSY) as (reader, weights, _):
        assert read_in_a_loop(reader, 20, of_its_version(weights))[0] > 0
    with interleaved(BUSY) as (reader, weights, _):
        monkeypatch.setattr(Reader, "_overtaken", lambda self, over: False)
        with pytest.raises((AssertionError, OdcError, IndexError, ValueError, RuntimeError)):
            read_in_a_loop(reader, 50, of_its_version(weights))


@pytest.mark.parametrize("moment", range(14))
def test_a_copy_that_is_overtaken_at_any_moment_is_brought_on_by_changes(job: Job, moment: int) -> None:
    """What was read is applied only once it is known to be of one version. It takes 12 halves of reads."""
    weights, halves = Weights(), iter(range(1000))

    def meanwhile() -> None:
        if next(halves) == moment:
            weights.publish(job, 10)

    with far_reader(job) as (reader, engine):
        weights.publish(job, 8)
        reader.read()
        engine.taken()
        weights.publish(job, 9)
        engine.meanwhile = meanwhile
        number, tensors = reader.read()
        assert (number, reader.overtaken) == ((3, 1) if moment < 12 else (2, 0))
        assert matches(tensors, weights, 7 + number) and engine.taken() < 0.1 * WHOLE


def test_with_a_second_buffer_a_first_read_may_go_on_while_the_next_version_is_published() -> None:
    weights = Weights()
    with packing(second_buffer=True) as job, far_reader(job) as (reader, engine):
        weights.publish(job, 1)
        engine.meanwhile = job.group.members[0].protocol.begin_publishing
        expect(reader, weights, 1)
        assert reader.overtaken == 0


def test_with_a_second_buffer_the_last_try_reads_whole_shards() -> None:
    """They can be read while the next version is published, where changes cannot."""
    weights, published = Weights(), list[int]()
    with packing(second_buffer=True) as job, far_reader(job, tries=2) as (reader, engine):
        weights.publish(job, 1)
        reader.read()
        weights.publish(job, 2)

        def meanwhile() -> None:
            if len(published) == reader.overtaken:  # once a try
                published.append(1)
                weights.publish(job, 2 + len(published))

        engine.meanwhile = meanwhile
        expect(reader, weights, 3)
        assert (len(published), reader.overtaken) == (2, 1)


@pytest.mark.parametrize("moment", range(18))
def test_with_a_second_buffer_groups_are_of_a_version_that_lasts_longer_than_its_changes(moment: int) -> None:
    """The next version is published at any moment; where their changes are gone by then, whole shards are read."""
    weights, halves = Weights(), iter(range(1000))

    def meanwhile() -> None:
        if next(halves) == moment:
            weights.publish(job, 3)

    with packing(second_buffer=True) as job, far_reader(job) as (reader, engine):
        weights.publish(job, 1)
        reader.read()
        weights.publish(job, 2)
        engine.meanwhile = meanwhile
        for group in read_groups(reader, 1, 2):
            assert matches(group, weights, 2)
        engine.meanwhile = lambda: None
        if next(halves) <= moment:
            weights.publish(job, 3)
        expect(reader, weights, 3)
        groups = read_groups(reader, 1, 3)
        next(groups)
        for version in (4, 5):
            weights.publish(job, version)
        with pytest.raises(StaleVersionError, match="version 5 was published while version 3 was still to be read"):
            list(groups)


def test_words_that_are_being_written_are_not_followed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """They might name bytes that no reader may read."""
    weights, halves = Weights(), iter(range(1000))
    unit, member = job.group.units[0], job.group.members[0]
    words = member.layout.mine.versions(unit)

    def meanwhile() -> None:
        if next(halves) == 0:
            member.protocol.begin_publishing()
            words.store(VersionWord.PLACE, place + (1 << 50))

    def sleep(seconds: float) -> None:
        words.store(VersionWord.PLACE, place)
        weights.publish(job, 10)

    with far_reader(job) as (reader, engine):
        weights.publish(job, 8)
        reader.read()
        weights.publish(job, 9)
        place, engine.meanwhile = words.load(VersionWord.PLACE), meanwhile
        monkeypatch.setattr("odc.deadlines.time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
        number, tensors = reader.read()
        assert (number, reader.overtaken) == (3, 1) and matches(tensors, weights, 10)
