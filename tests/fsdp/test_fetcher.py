from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.members import F32, HeapGroup

from odc.errors import WaitTimeoutError
from odc.fsdp.fetcher import Fetch, Fetcher
from odc.settings import Settings
from odc.trace import FETCH, recorder

LAYOUT = [[("w", 6, F32), ("b", 1, F32)], [("v", 3, F32)]]


class Param:
    """Stands in for a sharded parameter."""

    def __init__(self, numel: int, shard_dim: int = 0) -> None:
        self.numel, self.shard_dim = numel, shard_dim
        self.storage: torch.Tensor | None = None
        self.told: list[str] = []

    def allocate(self, shards: int) -> torch.Tensor:
        self.storage = torch.full((shards * self.numel,), -1.0)
        return self.storage

    def rearrange(self, by_shard: torch.Tensor, shards: int) -> None:
        assert self.storage is not None
        assert by_shard.data_ptr() != self.storage.data_ptr(), "it cannot be rearranged in place"
        self.told.append("rearrange")
        self.storage.copy_(by_shard)

    def ready(self) -> None:
        self.told.append("ready")

    def free(self) -> None:
        self.told.append("free")


class Gated:
    """Published shards whose fetch waits until it is let."""

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


def start(fetcher: Fetcher, group: HeapGroup, params: list[Param], unit: int = 0, *, now: bool = False) -> Fetch:
    return fetcher.start(group.units[unit], params, now=now)  # type: ignore[arg-type]


def values(param: Param) -> list[float]:
    assert param.storage is not None
    return param.storage.tolist()


# one fetch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("now", [True, False])
def test_a_fetch_fills_the_parameters_in_place_and_makes_them_ready(group: HeapGroup, ahead: int, now: bool) -> None:
    with fetching(group, ahead) as (fetcher, gated):
        gated.open.set()
        params = [Param(6), Param(1)]
        start(fetcher, group, params, now=now).wait()
        assert values(params[0]) == [1.0] * 6 + [2.0] * 6
        assert values(params[1]) == [1.0, 2.0]
        assert [param.told for param in params] == [["ready"], ["ready"]]


def test_a_parameter_sharded_along_another_dimension_is_rearranged_first(group: HeapGroup) -> None:
    with fetching(group, 0) as (fetcher, gated):
        gated.open.set()
        params = [Param(6, shard_dim=1), Param(1)]
        start(fetcher, group, params).wait()
        assert params[0].told == ["rearrange", "ready"]
        assert params[1].told == ["ready"]
        assert values(params[0]) == [1.0] * 6 + [2.0] * 6


def test_what_is_needed_at_once_is_copied_by_who_needs_it(group: HeapGroup) -> None:
    with fetching(group, 1) as (fetcher, gated):
        fetch = start(fetcher, group, [Param(6), Param(1)], now=True)
        assert not gated.begun.wait(0.05), "nobody begins before it is waited for"
        gated.open.set()
        fetch.wait()
        assert gated.lanes == ["MainThread"]


def test_what_is_fetched_ahead_is_copied_by_the_fetch_thread(group: HeapGroup) -> None:
    with fetching(group, 1) as (fetcher, gated):
        fetch = start(fetcher, group, [Param(6), Param(1)])
        assert gated.begun.wait(60.0), "it is under way before anybody waits for it"
        gated.open.set()
        fetch.wait()
        assert gated.lanes == ["odc-fetch"]


def test_a_fetch_that_is_given_up_copies_nothing_afterwards_and_frees_its_memory(group: HeapGroup) -> None:
    with fetching(group, 1) as (fetcher, gated):
        hold, params = start(fetcher, group, [Param(3)], 1), [Param(6), Param(1)]
        assert gated.begun.wait(60.0)
        queued = start(fetcher, group, params)
        queued.drop()
        gated.open.set()
        hold.wait()
        after = start(fetcher, group, [Param(3)], 1)
        after.wait()
        assert values(params[0]) == [-1.0] * 12
        assert [param.told for param in params] == [["free"], ["free"]]


def test_giving_up_a_fetch_under_way_waits_for_its_copy(group: HeapGroup) -> None:
    """Else it would write into memory that was freed, or read shards of the next epoch."""
    with fetching(group, 1) as (fetcher, gated):
        params = [Param(6), Param(1)]
        fetch = start(fetcher, group, params)
        assert gated.begun.wait(60.0)
        dropping = threading.Thread(target=fetch.drop)
        dropping.start()
        dropping.join(0.05)
        assert dropping.is_alive() and params[0].told == []
        gated.open.set()
        dropping.join(60.0)
        assert [param.told for param in params] == [["free"], ["free"]]


def test_an_error_of_the_fetch_thread_is_raised_where_the_unit_is_needed(group: HeapGroup) -> None:
    group.publish(0, 1.0)  # epoch 2, which member 1 never opens
    with fetching(group, 1) as (fetcher, gated):
        gated.open.set()
        fetch = start(fetcher, group, [Param(6), Param(1)])
        with pytest.raises(WaitTimeoutError, match="waiting for rank 13 to publish epoch 2"):
            fetch.wait()


def test_a_fetch_is_recorded_with_its_unit_bytes_and_lane(group: HeapGroup) -> None:
    with fetching(group, 1) as (fetcher, gated):
        gated.open.set()
        recorder().clear()
        start(fetcher, group, [Param(3)], 1).wait()
        start(fetcher, group, [Param(3)], 1, now=True).wait()
        spans = [span for span in recorder().spans() if span.category == FETCH]
        expected = group.units[1].published_bytes
        assert [(s.unit, s.nbytes, s.lane) for s in spans] == [("u1", expected, "fetch"), ("u1", expected, "main")]


# ahead ---------------------------------------------------------------------------------------------------------------


class Unit:
    """Stands in for a group that may be fetched ahead of use."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def unshard(self) -> None:
        self.log.append(self.name)


def passes(fetcher: Fetcher, units: list[Unit], log: list[str], phase: str = "forward") -> list[list[str]]:
    """Use the units one after the other; returns what was fetched ahead at each."""
    fetcher.restart(phase)
    found = []
    for unit in units:
        log.clear()
        fetcher.used(unit, phase)
        found.append(list(log))
    return found


def test_what_came_next_last_time_is_fetched_ahead(group: HeapGroup) -> None:
    log: list[str] = []
    a, b, c = units = [Unit(name, log) for name in "abc"]
    with fetching(group, 1) as (fetcher, _):
        assert passes(fetcher, units, log) == [[], [], []], "nothing is known yet"
        assert passes(fetcher, units, log) == [["b"], ["c"], []], "and nothing follows the last"
        assert passes(fetcher, [a, c, b], log) == [["b"], [], ["c"]], "the order has changed"
        assert passes(fetcher, [a, c, b], log)[:2] == [["c"], ["b"]]


def test_phases_are_learnt_apart(group: HeapGroup) -> None:
    log: list[str] = []
    units = [Unit(name, log) for name in "abc"]
    with fetching(group, 1) as (fetcher, _):
        passes(fetcher, units, log, "forward")
        assert passes(fetcher, units[::-1], log, "backward") == [[], [], []]
        assert passes(fetcher, units[::-1], log, "backward") == [["b"], ["a"], []]
        assert passes(fetcher, units, log, "forward") == [["b"], ["c"], []]


def test_as_many_units_as_set_are_fetched_ahead(group: HeapGroup) -> None:
    log: list[str] = []
    units = [Unit(name, log) for name in "abcd"]
    with fetching(group, 2) as (fetcher, _):
        passes(fetcher, units, log)
        assert passes(fetcher, units, log) == [["b", "c"], ["c", "d"], ["d"], []]


def test_nothing_is_fetched_ahead_when_told_so(group: HeapGroup) -> None:
    log: list[str] = []
    units = [Unit(name, log) for name in "abc"]
    before = threading.active_count()
    with fetching(group, 0) as (fetcher, _):
        assert threading.active_count() == before
        passes(fetcher, units, log)
        assert passes(fetcher, units, log) == [[], [], []]


def test_a_unit_used_twice_in_a_row_does_not_follow_itself(group: HeapGroup) -> None:
    log: list[str] = []
    a, b = (Unit(name, log) for name in "ab")
    with fetching(group, 1) as (fetcher, _):
        passes(fetcher, [a, a, b], log)
        assert passes(fetcher, [a, a, b], log) == [["b"], ["b"], []]


def test_a_unit_that_is_gone_is_not_kept_alive_nor_fetched(group: HeapGroup) -> None:
    log: list[str] = []
    a, b = Unit("a", log), Unit("b", log)
    with fetching(group, 1) as (fetcher, _):
        passes(fetcher, [a, b], log)
        del b
        gc.collect()
        assert passes(fetcher, [a], log) == [[]]
