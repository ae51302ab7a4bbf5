"""Shards that cross to other hosts as their changes, or not at all: the same bits, and fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.changing import LAYOUT, WHOLE_BYTES, Weights, crossed, two_hosts
from support.members import HeapGroup
from support.spread import HOSTS

from odc.errors import OdcError, UnsupportedError
from odc.movers import changes
from odc.protocol import Word
from odc.protocol.changes import WHOLE, PublishedChanges
from odc.protocol.words import VersionWord
from odc.settings import Settings
from odc.trace import recorder

#: Whether shards lie on a device, which does its work late and packs as `support.change_tiles` does.
on_devices = pytest.mark.parametrize("late", [False, True], ids=["cpu", "device"])


@on_devices
def test_a_host_that_has_nothing_reads_whole_whatever_it_is_told(late: bool) -> None:
    with two_hosts(late) as spread:
        weights = Weights()
        weights.publish(spread)
        for member in range(4):
            for reader in (me for me in range(4) if spread.group.layouts[me].grid.is_remote(member)):
                words = spread.group.layouts[reader].remote(member).versions(spread.group.units[0])
                for i in range(len(VersionWord)):
                    words.store(i, 0)
        for me in range(4):
            weights.expect(spread, me, 0)
        assert crossed(spread) == 4 * WHOLE_BYTES


@on_devices
@pytest.mark.parametrize("second_buffer", [False, True])
def test_only_changes_cross_after_the_first_time(late: bool, second_buffer: bool) -> None:
    weights = Weights()
    recorder().clear()
    with two_hosts(late, second_buffer=second_buffer) as spread:
        total = 0
        for step in range(4):
            weights.publish(spread)
            said = {
                layout.mine.versions(spread.group.units[0]).load(VersionWord.PACKED) for layout in spread.group.layouts
            }
            assert (said == {WHOLE}) == (step == 0) and max(said) < 0.12 * WHOLE_BYTES
            for me in range(4):
                weights.expect(spread, me, 0)
            nbytes = crossed(spread)
            total += nbytes
            assert nbytes == 4 * WHOLE_BYTES if step == 0 else 0 < nbytes < 0.12 * 4 * WHOLE_BYTES
            weights.step(1e-5, step)
        saved = sum(layout.mine.board.load(Word.SAVED) for layout in spread.group.layouts)
        assert saved == 4 * 4 * WHOLE_BYTES - total
    spans = [span for span in recorder().spans() if span.lane == "hosts"]
    assert sum(span.nbytes for span in spans) == total, "a trace shows what was read"
    assert sum(int(span.unit.removesuffix(" bytes saved")) for span in spans) == saved, "and what was not"


@on_devices
def test_what_has_not_changed_does_not_cross(late: bool) -> None:
    weights = Weights()
    with two_hosts(late, changes="auto") as spread:
        for step in range(3):
            weights.publish(spread)
            for me in range(4):
                for unit in range(3):
                    weights.expect(spread, me, unit)
            nbytes = crossed(spread)
            assert step == 0 or 0.6 * 4 * 120_000 <= nbytes <= 4 * 120_000, "unit 1 alone is trained"
            weights.step(1e-3, step, units=(1,))


@on_devices
def test_a_cache_that_skipped_a_version_gets_the_whole_shard(late: bool) -> None:
    weights = Weights()
    with two_hosts(late) as spread:
        weights.publish(spread)
        weights.expect(spread, 0, 0)
        for step in range(2):
            weights.step(1e-5, step)
            weights.publish(spread)
        crossed(spread)
        weights.expect(spread, 0, 0)
        assert crossed(spread) == 2 * WHOLE_BYTES


@on_devices
def test_epochs_that_change_nothing_lie_between_a_cache_and_its_changes(late: bool) -> None:
    """Evaluation, or `publish()` without a step."""
    weights = Weights()
    with two_hosts(late) as spread:
        weights.publish(spread)
        weights.expect(spread, 0, 0)
        for step in range(2):
            weights.publish(spread)
            weights.publish(spread)
            weights.step(1e-5, step)
            weights.publish(spread)
            crossed(spread)
            weights.expect(spread, 0, 0)
            assert 0 < crossed(spread) < 0.12 * 2 * WHOLE_BYTES


@on_devices
def test_an_epoch_that_changes_nothing_comes_after_changes_that_a_host_has_not_read(late: bool) -> None:
    """On a device they are gone then, if they have taken their region as a whole."""
    weights = Weights()
    with two_hosts(late) as spread:
        weights.publish(spread)
        weights.expect(spread, 0, 0)
        for rate, share in ((1e-5, 0.12), (1e-4, 0.4)):
            weights.step(rate, 1)
            weights.publish(spread)
            weights.publish(spread)
            crossed(spread)
            weights.expect(spread, 0, 0)
            found = crossed(spread)
            assert found == 2 * WHOLE_BYTES if late and rate == 1e-4 else found < share * 2 * WHOLE_BYTES
        weights.publish(spread)
        weights.expect(spread, 0, 0)
        assert crossed(spread) == 0


@on_devices
def test_weights_that_change_altogether_cross_whole(late: bool) -> None:
    weights = Weights()
    with two_hosts(late) as spread:
        for step in range(2):
            weights.publish(spread)
            for me in range(4):
                weights.expect(spread, me, 0)
            assert crossed(spread) == 4 * WHOLE_BYTES
            weights.step(1.0, step)


@on_devices
@pytest.mark.parametrize("word", [VersionWord.BASE, VersionWord.CHECKSUM])
def test_changes_of_another_version_are_noticed(word: VersionWord, late: bool) -> None:
    """As a fault of odc would show: the checksum that is compared where the protocol is checked."""
    weights = Weights()
    with two_hosts(late) as spread:
        weights.publish(spread)
        weights.expect(spread, 0, 0)
        for step in range(2):
            weights.step(1e-5, step)
            weights.publish(spread)
        for layout in spread.group.layouts[:2]:
            versions = layout.remote(2).versions(spread.group.units[0])
            versions.store(word, 1)
        with pytest.raises(OdcError, match=r"rank 10 \(epoch 3\): the shard of unit 'u0' of rank 16 is not what"):
            weights.expect(spread, 0, 0)


@on_devices
def test_a_rank_that_reads_for_one_that_has_left_takes_the_whole_shard_and_is_not_patched_after(late: bool) -> None:
    weights = Weights()
    with two_hosts(late) as spread:
        weights.publish(spread)
        weights.expect(spread, 0, 0)
        weights.step(1e-5, 1)
        weights.publish(spread)
        unit, peer = spread.group.units[0], spread.group.layouts[1].share(2)
        reads, patched = spread.caches[1].reads, list[int]()
        read = spread.engines[1].read

        def meanwhile(*arguments: Any, **options: Any) -> None:
            read(*arguments, **options)
            if not patched:  # between reading the changes and applying them another rank has read the shard
                patched.append(1)
                spread.caches[0].reads.bring_whole(spread.group.layouts[0].share(2), unit, 2)

        spread.engines[1].read = meanwhile  # type: ignore[method-assign]
        reads.bring([(peer, unit)], 2)
        assert patched
        weights.expect(spread, 0, 0)


def test_changes_whose_announcement_is_interrupted_are_not_applied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch that changes nothing offers the same changes once more."""
    weights = Weights()

    def interrupted(*unused: object) -> None:
        raise KeyboardInterrupt

    with two_hosts() as spread:
        weights.publish(spread)
        weights.expect(spread, 0, 0)
        weights.step(1e-5, 1)
        weights.publish(spread)
        unit, share = spread.group.units[0], spread.group.layouts[0].share(2)
        with monkeypatch.context() as patch:
            patch.setattr("odc.hosts.changes._announce", interrupted)
            with pytest.raises(KeyboardInterrupt):
                spread.caches[0].reads.bring([(share, unit)], 2)
        weights.publish(spread)
        crossed(spread)
        weights.expect(spread, 0, 0)
        assert WHOLE_BYTES < crossed(spread) < 2 * WHOLE_BYTES, "one shard whole, of the other the changes"


@on_devices
def test_a_publish_that_was_interrupted_is_published_whole(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies there is new already, in part at least, and equals what is published again."""
    weights = Weights()

    def interrupted(units: object) -> None:
        raise KeyboardInterrupt

    with two_hosts(late) as spread:
        weights.publish(spread)
        for me in range(4):
            weights.expect(spread, me, 0)
        weights.step(1e-5, 1)
        with monkeypatch.context() as patch:
            patch.setattr(spread.group.layouts[2], "clear", interrupted)
            with pytest.raises(KeyboardInterrupt):
                weights.publish(spread)
        for member in (2, 3):  # the others have published
            spread.group.members[member].shards.publish(weights.of[member], [False] * len(LAYOUT))
        spread.mirror(Word.PUBLISHED)
        for step in (1, 2):
            for me in range(4):
                weights.expect(spread, me, 0)
            weights.step(1e-5, step)
            weights.publish(spread)


@given(st.data())
@settings(deadline=None)
def test_any_order_of_steps_and_fetches_gives_the_published_bits(data: st.DataObject) -> None:
    weights = Weights()
    with two_hosts(data.draw(st.booleans()), changes=data.draw(st.sampled_from(["on", "auto"]))) as spread:
        for step in range(data.draw(st.integers(2, 5))):
            weights.publish(spread)
            for me, unit in data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=6)):
                weights.expect(spread, me, unit)
            for cache in spread.caches:
                cache.settle()
            units = data.draw(st.sampled_from([(), (0,), (0, 1), (0, 1, 2)]))
            weights.step(data.draw(st.sampled_from([1e-6, 1e-4, 1.0])), step, units)


def test_nothing_is_kept_where_changes_are_off() -> None:
    weights = Weights()
    with two_hosts(changes="off") as spread:
        assert "changes" not in spread.group.layouts[0].ledger()
        for _ in range(2):
            weights.publish(spread)
            weights.expect(spread, 0, 0)
            assert crossed(spread) == 2 * WHOLE_BYTES


def test_packing_without_numba_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "numba", lambda: None)
    with HeapGroup(LAYOUT, 4, hosts=HOSTS) as group:
        group.layouts[0].settings = Settings(timeout_s=60.0, changes="on")
        with pytest.raises(
            UnsupportedError,
            match=r"packs by numba, which is not installed or does not load: pip install -e '.\[fast\]'",
        ):
            PublishedChanges(group.members[0].protocol, lambda nbytes: 0.0)
    with pytest.raises(ValueError, match="changes must be one of auto, off, on, not 'some'"):
        Settings(changes="some")  # type: ignore[arg-type]
