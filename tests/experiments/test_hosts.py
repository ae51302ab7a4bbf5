"""Hosts that run a comparison together, as threads of this process that launch nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from odc.errors import ConfigError, OdcError
from odc.experiments import hosts
from odc.experiments.clock import CommonClock
from odc.experiments.hosts import HostTeam
from odc.experiments.launch import JobFailedError, LaunchSite
from odc.experiments.results import JobResult
from odc.ranks.processes import host_store
from odc.trace import WINDOW, Span, load_spans, rank_file, save_spans

SPANS = [Span(WINDOW, "main", rank, rank + 5, 1, unit="a" * 700_000) for rank in range(4)]


def on_both(function: Callable[[HostTeam], Any]) -> list[Any]:
    """What a function returns or raises on each of two hosts of two ranks."""
    store: Any = host_store()
    stores: Any = dist

    def host(number: int) -> Any:
        try:
            with HostTeam(number, 2, 2, "127.0.0.1", stores.PrefixStore("t", store.clone()), 60.0) as team:
                return function(team)
        except OdcError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(host, range(2)))


@pytest.fixture
def sites(monkeypatch: pytest.MonkeyPatch) -> list[LaunchSite]:
    """Where ranks would have been launched; those of a failing entry fail."""
    found: list[LaunchSite] = []

    def launch(entry: Callable[[int], Any], *args: Any, ranks: int, site: LaunchSite) -> list[Any]:
        found.append(site)
        values, failures = [], []
        for rank in site.ranks:
            try:
                values.append(entry(rank))
            except ValueError as error:
                failures.append((rank, str(error)))
        if failures:
            raise JobFailedError(failures, {})
        return values

    monkeypatch.setattr(hosts, "launch", launch)
    return found


def test_ranks_of_both_hosts_meet_in_one_store_a_run(sites: list[LaunchSite]) -> None:
    def twice(team: HostTeam) -> list[Any]:
        return [team.launch(run, lambda rank, run=run: 10 * run + rank) for run in range(2)]

    assert on_both(twice) == [[[0, 1], [10, 11]], [[2, 3], [12, 13]]]
    assert {(site.host, site.hosts, site.world, site.ranks) for site in sites} == {
        (0, 2, 4, range(2)),
        (1, 2, 4, range(2, 4)),
    }
    first, second = (site.environment(site.ranks[1]) for site in sorted(sites, key=lambda site: site.host)[1:3])
    assert (first["RANK"], first["LOCAL_RANK"], first["LOCAL_WORLD_SIZE"]) == ("1", "1", "2")
    assert (second["RANK"], second["LOCAL_RANK"], second["GROUP_RANK"], second["WORLD_SIZE"]) == ("3", "1", "1", "4")
    assert len({site.port for site in sites}) == 2, "each run has a store of its own, which both hosts know"


def test_the_first_host_gets_what_all_ranks_measured(sites: list[LaunchSite], tmp_path: Path) -> None:
    def run(team: HostTeam) -> Any:
        folder = tmp_path / str(team.number)

        def rank(number: int) -> JobResult[Any]:
            save_spans(rank_file(folder, number), [SPANS[number]])
            return JobResult(number, [], 100 + number, None, 50, "checkpoint", host=team.number)

        return team.collect(0, team.launch(0, rank), folder)

    everywhere, there = on_both(run)
    assert [(one.rank, one.peak_bytes, one.host) for one in everywhere] == [(r, 100 + r, r // 2) for r in range(4)]
    assert [one.rank for one in there] == [2, 3]
    assert [load_spans(rank_file(tmp_path / "0", rank)) for rank in range(4)] == [[span] for span in SPANS]


def test_both_hosts_name_the_rank_that_is_to_blame(sites: list[LaunchSite]) -> None:
    def rank(number: int) -> None:
        if number == 3:
            raise ValueError("the process was killed by SIGKILL")
        raise ValueError("PeerLostError: rank 3 died")

    for error in on_both(lambda team: team.launch(0, rank)):
        assert isinstance(error, JobFailedError)
        assert str(error).startswith("rank 3 failed: the process was killed by SIGKILL\n  then rank ")
        assert len(error.failures) == 4


def test_a_clean_exit_waits_for_the_other_host() -> None:
    """The store may live in the process of the first, which the other still needs."""
    store, stores, order = host_store(), cast(Any, dist), list[str]()

    def host(number: int) -> None:
        with HostTeam(number, 2, 2, "127.0.0.1", stores.PrefixStore("t", cast(Any, store).clone()), 60.0):
            if number == 1:
                time.sleep(0.5)
                order.append("host 1 is done")
        order.append("a host has left")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(host, range(2)))
    assert order == ["host 1 is done", "a host has left", "a host has left"]


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_host_that_ends_is_not_waited_for(sites: list[LaunchSite], wrong: int) -> None:
    def run(team: HostTeam) -> None:
        if team.number == wrong:
            raise ConfigError("data: there is no file")
        team.launch(0, lambda rank: rank)

    found = on_both(run)
    assert str(found[wrong]) == "data: there is no file"
    assert str(found[1 - wrong]).endswith(
        f": host {wrong} failed in the comparison: ConfigError: data: there is no file"
    )
    assert not sites, "no rank has been started"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, list[int]], HostTeam]:
    """The team of a host, whose launcher has started so many ranks on each."""
    store: Any = host_store()
    monkeypatch.setattr(hosts, "store_of_hosts", lambda number, timeout_s: store.clone())

    def team(number: int, ranks: list[int]) -> HostTeam:
        sizes = {"GROUP_WORLD_SIZE": len(ranks), "LOCAL_WORLD_SIZE": ranks[number], "WORLD_SIZE": sum(ranks)}
        for name, value in (sizes | {"GROUP_RANK": number, "MASTER_ADDR": "127.0.0.1"}).items():
            monkeypatch.setenv(name, str(value))
        return HostTeam.of_launcher()

    return team


@pytest.mark.parametrize("ranks", [[2, 4], [4, 2], [2, 3]])
def test_hosts_with_unequally_many_ranks_are_refused(started: Callable[..., HostTeam], ranks: list[int]) -> None:
    message = f"{sum(ranks)} ranks on 2 hosts, {ranks[0]} of them here: every host must start"
    with pytest.raises(ConfigError, match=message):
        started(0, ranks)


def test_a_host_that_has_the_mean_number_learns_that_others_have_not(
    started: Callable[..., HostTeam], sites: list[LaunchSite], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "_PREPARE_S", 60.0)  # or a host that learns nothing waits for hours
    for refused in (1, 2):
        with pytest.raises(ConfigError):
            started(refused, [2, 3, 1])
    with pytest.raises(OdcError, match=r"host 1 failed in the comparison: ConfigError: 6 ranks on 3 hosts, 3 of them"):
        started(0, [2, 3, 1]).launch(0, print)
    assert not sites, "no rank has been started"


AHEAD_NS = (0, 0, 5 * 10**12, 5 * 10**12)  # of each rank's clock


def on_one_clock(rank: int, world: int) -> tuple[Any, ...]:
    clock = CommonClock("ab"[rank // 2], lambda: time.monotonic_ns() + AHEAD_NS[rank])
    clock.align()
    (moved,) = clock.on_rank_0([Span(WINDOW, "main", AHEAD_NS[rank] + 7, AHEAD_NS[rank] + 9)])
    return clock.hosts, clock.offset_ns, clock.error_ns, moved.start_ns, moved.end_ns


def test_clocks_of_hosts_are_brought_together(ranks: Callable[[int], Any]) -> None:
    for rank, (found, offset, error, start, end) in enumerate(ranks(4).run(on_one_clock)):
        assert found == (0, 0, 1, 1)
        assert abs(offset + AHEAD_NS[rank]) <= error, "it is off by no more than its error"
        assert (offset, error) == (0, 0) if rank < 2 else error > 0
        assert (start - 7, end - start) == (offset + AHEAD_NS[rank], 2)
