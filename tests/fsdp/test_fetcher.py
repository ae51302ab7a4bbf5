from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.members import F32, HeapGroup

from odc.errors import WaitTimeoutError
from odc.fsdp.fetcher import Fetch, FetchedGroup, Fetcher
from odc.fsdp.group import OdcParamGroup
from odc.settings import Settings
from odc.trace import FETCH, recorder
from odc.worker import Job

LAYOUT = [[("w", 6, F32), ("b", 1, F32)], [("v", 3, F32)]]


class Param:
    """Stands in for a sharded parameter."""

    def __init__(self, numel: int, shard_dim: int = 0) -> None:
        self.numel, self.shard_dim = numel, shard_dim
        self.storage: torch.Tensor | None = None
        self.calls: list[str] = []

    def allocate(self, shards: int) -> torch.Tensor:
        self.storage = torch.full((shards * self.numel,), -1.0)
        return self.storage

    def rearrange(self, by_shard: torch.Tensor, shards: int) -> None:
        assert self.storage is not None
        assert by_shard.data_ptr() != self.storage.data_ptr(), "it cannot be rearranged in place"
        self.calls.append("rearrange")
        self.storage.copy_(by_shard)

    def ready(self) -> None:
        self.calls.append("ready")

    def free(self) -> None:
        self.calls.append("free")


class Gated:
    """Published shards whose fetch waits until the gate is open."""

    def __init__(self, group: HeapGroup) -> None:
        self.real, self.count = group.members[0].shards, group.members[0].shards.count
        self.open, self.begun = threading.Event(), threading.Event()
        self.lanes: list[str] = []

    def fetch(self, unit: Any, destinations: Any, *, lane: str = "main") -> int:
        self.lanes.append(threading.current_thread().name)
        self.begun.set()
        assert self.open.wait(60.0)
        return self.real.fetch(unit, destinations, lane=lane)


@pytest.fixture
def group() -> Iterator[HeapGroup]:
    with HeapGroup(LAYOUT, 2, settings=Settings(timeout_s=0.2)) as group:
        group.attach()
        for member in (0, 1):
            group.publish(member, 1.0 + member)
        yield group


@contextlib.contextmanager
def fetching(group: HeapGroup, ahead: int) -> Iterator[tuple[Fetcher, Gated]]:
    gated = Gated(group)
    fetcher = Fetcher(gated, ahead)  # type: ignore[arg-type]
    try:
        yield fetcher, gated
    finally:
        gated.open.set()
        fetcher.close()


def assert_drop_waits(drop: Callable[[], None], gated: Gated, params: list[Param]) -> None:
    """For the copy under way, and frees their memory only then."""
    dropping = threading.Thread(target=drop)
    dropping.start()
    dropping.join(0.05)
    assert dropping.is_alive() and params[0].calls == []
    gated.open.set()
    dropping.join(60.0)
    assert [param.calls for param in params] == [["free"], ["free"]]


def start(fetcher: Fetcher, group: HeapGroup, params: list[Param], unit: int = 0, *, now: bool = False) -> Fetch:
    fetch = fetcher.prepare(group.units[unit], params, now=now)  # type: ignore[arg-type]
    fetch.begin()
    return fetch


def values(param: Param) -> list[float]:
    assert param.storage is not None
    return param.storage.tolist()


# one fetch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_dim", [0, 1])
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("now", [True, False])
def test_a_fetch_fills_the_parameters_and_makes_them_ready(
    group: HeapGroup, ahead: int, now: bool, shard_dim: int
) -> None:
    """In place, except for one that is sharded along another dimension, which is rearranged."""
    with fetching(group, ahead) as (fetcher, gated):
        gated.open.set()
        params = [Param(6, shard_dim), Param(1)]
        start(fetcher, group, params, now=now).wait()
        assert values(params[0]) == [1.0] * 6 + [2.0] * 6
        assert values(params[1]) == [1.0, 2.0]
        assert [param.calls for param in params] == [["rearrange", "ready"][1 - shard_dim :], ["ready"]]


@pytest.mark.parametrize(("now", "thread", "lane"), [(True, "MainThread", "main"), (False, "odc-fetch", "fetch")])
def test_what_is_needed_at_once_is_copied_by_the_thread_that_needs_it(
    group: HeapGroup, now: bool, thread: str, lane: str
) -> None:
    recorder().clear()
    with fetching(group, 1) as (fetcher, gated):
        fetch = start(fetcher, group, [Param(3)], 1, now=now)
        assert gated.begun.wait(0.05 if now else 60.0) != now, "ahead of use it begins before it is waited for"
        gated.open.set()
        fetch.wait()
        assert gated.lanes == [thread]
    (span,) = [span for span in recorder().spans() if span.category == FETCH]
    assert (span.unit, span.nbytes, span.lane) == ("u1", group.units[1].published_bytes, lane)


def test_a_fetch_that_is_given_up_copies_nothing_afterwards_and_frees_its_memory(group: HeapGroup) -> None:
    with fetching(group, 1) as (fetcher, gated):
        hold, params = start(fetcher, group, [Param(3)], 1), [Param(6), Param(1)]
        assert gated.begun.wait(60.0)
        queued = start(fetcher, group, params)
        queued.drop()
        gated.open.set()
        hold.wait()
        start(fetcher, group, [Param(3)], 1).wait()
        assert values(params[0]) == [-1.0] * 12
        assert [param.calls for param in params] == [["free"], ["free"]]


def test_giving_up_a_fetch_under_way_waits_for_its_copy(group: HeapGroup) -> None:
    """Else it would write into memory that was freed, or read shards of the next epoch."""
    with fetching(group, 1) as (fetcher, gated):
        params = [Param(6), Param(1)]
        fetch = start(fetcher, group, params)
        assert gated.begun.wait(60.0)
        assert_drop_waits(fetch.drop, gated, params)


@pytest.mark.parametrize("wait", ["result", "cancel"])
def test_a_wait_that_a_signal_ends_leaves_the_fetch_to_be_dropped(
    group: HeapGroup, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    """Ctrl-C, or a time limit whose handler raises, and a loop that goes on: the copy writes into this memory."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    with fetching(group, 1) as (fetcher, gated):
        params, unit = [Param(6), Param(1)], FetchedGroup.__new__(FetchedGroup)
        unit.odc_fetch = fetch = start(fetcher, group, params)
        assert gated.begun.wait(60.0)
        with monkeypatch.context() as signalled:
            signalled.setattr(fetch.job, wait, interrupted)
            with pytest.raises(KeyboardInterrupt):
                unit.await_fetch() if wait == "result" else unit.drop_fetch()
        assert_drop_waits(unit.drop_fetch, gated, params)
        assert unit.odc_fetch is None


def test_a_unit_keeps_its_fetch_before_a_thread_can_begin_it(group: HeapGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may come as the thread is woken."""

    def interrupted(job: Any) -> None:
        raise KeyboardInterrupt

    with fetching(group, 1) as (fetcher, _):
        unit = OdcParamGroup.__new__(OdcParamGroup)
        unit.odc_fetch, unit.odc_root, unit.odc_needed_now, unit.odc_fetcher = None, unit, False, fetcher
        unit.odc_unit, unit.odc_params = group.units[1], [Param(3)]  # type: ignore[list-item]
        unit.odc_minibatch = SimpleNamespace(begin=lambda: None)  # type: ignore[assignment]
        given: Any = unit
        given._sharded_state, given.unshard_in_backward = None, True
        monkeypatch.setattr(fetcher._worker, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            unit.unshard()
        assert unit.odc_fetch is not None and not unit.odc_fetch.job.over()
        unit.drop_fetch()


def test_a_fetch_whose_drop_a_signal_ends_does_not_pass_for_one_that_is_over(group: HeapGroup) -> None:
    """Its memory is free by then, or about to be, and the unit's next use would have read it."""

    class Interrupting(Param):
        def free(self) -> None:
            raise KeyboardInterrupt

    with fetching(group, 0) as (fetcher, _):
        unit = FetchedGroup.__new__(FetchedGroup)
        unit.odc_fetch = start(fetcher, group, [Interrupting(6), Param(1)])
        with pytest.raises(KeyboardInterrupt):
            unit.drop_fetch()
        assert unit.odc_fetch is None


def test_a_fetch_that_is_over_is_not_kept() -> None:
    def fail() -> None:
        raise WaitTimeoutError("rank 1 is late", culprit=1)

    unit = FetchedGroup.__new__(FetchedGroup)
    unit.odc_fetch = Fetch(Job(fail), [], [], 1, lambda: None)
    with pytest.raises(WaitTimeoutError):
        unit.await_fetch()
    assert unit.odc_fetch is None


def test_an_error_of_the_fetch_thread_is_raised_where_the_unit_is_needed(group: HeapGroup) -> None:
    group.publish(0, 1.0)  # epoch 2, which member 1 never opens
    with fetching(group, 1) as (fetcher, gated):
        gated.open.set()
        fetch = start(fetcher, group, [Param(6), Param(1)])
        with pytest.raises(WaitTimeoutError, match="waiting for rank 13 to publish epoch 2"):
            fetch.wait()


def test_what_the_fetch_thread_writes_to_is_no_inference_tensor(group: HeapGroup) -> None:
    """An evaluation in inference mode asks for it, and the thread, which is in none, could not write to it."""
    with fetching(group, 1) as (fetcher, gated):
        gated.open.set()
        with torch.inference_mode():
            fetch = start(fetcher, group, [Param(6, 1), Param(1)])
            fetch.wait()
        assert not fetch.by_shard[0].is_inference()


# ahead ---------------------------------------------------------------------------------------------------------------


class Unit:
    """Stands in for a group that may be fetched ahead of use."""

    log = ""  # of all units: what was fetched ahead
    unshard_in_backward = True

    def __init__(self, name: str) -> None:
        self.name = name

    def unshard(self) -> None:
        Unit.log += self.name


def passes(fetcher: Fetcher, units: list[Unit], phase: str = "forward") -> list[str]:
    """Use the units one after the other; returns what was fetched ahead at each."""
    fetcher.restart()
    found = []
    for unit in units:
        Unit.log = ""
        fetcher.used(unit, phase)  # type: ignore[arg-type]
        found.append(Unit.log)
    return found


def test_what_came_next_last_time_is_fetched_ahead(group: HeapGroup) -> None:
    a, b, c = units = [Unit(name) for name in "abc"]
    with fetching(group, 1) as (fetcher, _):
        assert passes(fetcher, units) == ["", "", ""], "nothing is known yet"
        assert passes(fetcher, units[::-1], "backward") == ["", "", ""], "phases are learnt apart"
        assert passes(fetcher, units[::-1], "backward") == ["b", "a", ""]
        assert passes(fetcher, units) == ["b", "c", ""], "and nothing follows the last"
        assert passes(fetcher, [a, c, b]) == ["b", "", "c"], "the order has changed"
        assert passes(fetcher, [a, c, b])[:2] == ["c", "b"]


@pytest.mark.parametrize(("ahead", "found"), [(0, ["", "", "", ""]), (2, ["bc", "cd", "d", ""])])
def test_as_many_units_as_set_are_fetched_ahead(group: HeapGroup, ahead: int, found: list[str]) -> None:
    units = [Unit(name) for name in "abcd"]
    with fetching(group, ahead) as (fetcher, _):
        passes(fetcher, units)
        assert passes(fetcher, units) == found


def test_copies_of_a_fetch_that_failed_are_followed() -> None:
    """On a device some may still be under way, into memory that is about to have another use."""

    def fail() -> None:
        raise WaitTimeoutError("rank 1 is late", culprit=1)

    followed = list[bool]()
    fetch = Fetch(Job(fail), [], [], 1, lambda: followed.append(True))
    with pytest.raises(WaitTimeoutError):
        fetch.wait()
    assert followed == [True]


def test_a_unit_used_twice_in_a_row_does_not_follow_itself(group: HeapGroup) -> None:
    a, b = Unit("a"), Unit("b")
    with fetching(group, 1) as (fetcher, _):
        passes(fetcher, [a, a, b])
        assert passes(fetcher, [a, a, b]) == ["b", "b", ""]


def test_a_unit_that_is_gone_is_not_kept_alive_nor_fetched(group: HeapGroup) -> None:
    a, b = Unit("a"), Unit("b")
    with fetching(group, 1) as (fetcher, _):
        passes(fetcher, [a, b])
        del b
        gc.collect()
        assert passes(fetcher, [a]) == [""]


def test_a_unit_that_a_backward_does_not_need_is_passed_over(group: HeapGroup) -> None:
    a, b, c, d = units = [Unit(name) for name in "abcd"]
    b.unshard_in_backward = False
    with fetching(group, 1) as (fetcher, _):
        for phase, found in (("backward", ["c", "c", "d", ""]), ("forward", ["b", "c", "d", ""])):
            passes(fetcher, units, phase)
            assert passes(fetcher, units, phase) == found
        c.unshard_in_backward = False
        passes(fetcher, [b, c, b], "backward")
        assert passes(fetcher, [b, c, b], "backward") == ["", "", ""], "the order goes in a circle"
        assert passes(fetcher, [d, a], "backward") == ["", ""]
