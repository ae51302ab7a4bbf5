"""One conformance suite for all engines, between two hosts and within one (over the loopback interface)."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from support import engines
from support.host_ranks import HostRanks, spawn_on_hosts
from support.hosts import Hosts, need_hosts
from support.ranks import RankPool

from odc.errors import UnsupportedError
from odc.net.engines import choose_engine, nixl
from odc.net.engines.nixl import EXTRA, installed, interface_of, rdma_devices

ENGINES = (
    "sockets",
    pytest.param("nixl", marks=pytest.mark.skipif(installed() is None, reason=f"needs NIXL: {EXTRA}")),
)
WITH_STAGED = (*ENGINES, "staged")
Run = Callable[..., list[object]]
_numbers = itertools.count()


def fresh() -> str:
    """A name for a meeting."""
    return f"meeting{next(_numbers)}"


@pytest.fixture(params=["hosts", "loopback"])
def run(request: pytest.FixtureRequest) -> Run:
    """`run(task, engine)` runs a task of the suite on two ranks."""
    if request.param == "hosts":
        pool = request.getfixturevalue("host_ranks")(2, 1)
    else:
        pool = request.getfixturevalue("ranks")(2)
    assert isinstance(pool, RankPool)
    return lambda task, engine: pool.run(task, engine, fresh())


@pytest.mark.parametrize("engine", WITH_STAGED)
@pytest.mark.parametrize(
    "task", [engines.read_everything, engines.read_at_once, engines.read_what_is_refused, engines.ask_for_numbers]
)
def test_reads(run: Run, engine: str, task: Callable[..., object]) -> None:
    run(task, engine)


@pytest.mark.parametrize("engine", WITH_STAGED)
def test_a_large_region_that_was_exposed_later(run: Run, engine: str) -> None:
    run(engines.read_a_lot, engine)


@pytest.fixture
def two() -> Iterator[Hosts]:
    need_hosts()
    with Hosts(2) as hosts:
        yield hosts


def ended(job: HostRanks, rank: int) -> object:
    """What the rank returned."""
    while not job.outcomes[rank].answered and job.outcomes[rank].exit_code is None:
        job.receive(0.05)
    assert job.outcomes[rank].error is None, job.outcomes[rank].describe()
    return job.outcomes[rank].value


@pytest.mark.parametrize("engine", ENGINES)
def test_a_death_during_reads_is_named_though_a_child_lives(two: Hosts, engine: str) -> None:
    with spawn_on_hosts(two, 1, engines.read_from_the_dying, engine, fresh()) as job:
        job.until_told(1)
        killed = job.kill(1)
        said, culprit, at = ended(job, 0)  # type: ignore[misc]
    assert culprit == 1
    assert "rank 0, reading shards of rank 1: " in said
    print(f"named after {at - killed:.2f} s: {said}")


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_is_not_dead(two: Hosts, engine: str, stopped: int) -> None:
    with spawn_on_hosts(two, 1, engines.read_from_the_stopped, engine, fresh()) as job:
        job.until_told(1)
        time.sleep(1.0)
        job.signal(stopped, signal.SIGSTOP)
        time.sleep(4.0)
        job.signal(stopped, signal.SIGCONT)
        assert max(ended(job, 0), ended(job, 1)) > 2.0  # type: ignore[type-var]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_is_stopped_for_too_long_is_named(two: Hosts, engine: str) -> None:
    with spawn_on_hosts(two, 1, engines.read_with_little_patience, engine, fresh()) as job:
        said = str(ended(job, 0))
        job.signal(1, signal.SIGCONT)
    assert said.startswith("rank 0, reading shards of rank 1: not")
    assert " 1 s" in said


@pytest.mark.parametrize("engine", ENGINES)
def test_who_waits_for_a_rank_learns_of_an_abort(two: Hosts, engine: str) -> None:
    with spawn_on_hosts(two, 1, engines.read_until_aborted, engine, fresh()) as job:
        ended(job, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
def test_a_host_that_cannot_be_reached_is_lost(two: Hosts, engine: str) -> None:
    with spawn_on_hosts(two, 1, engines.read_from_the_dying, engine, fresh()) as job:
        job.until_told(1)
        two.drop(1)
        begin = time.monotonic()
        said, culprit, at = ended(job, 0)  # type: ignore[misc]
    assert culprit == 1
    print(f"named after {at - begin:.2f} s: {said}")


# which engine --------------------------------------------------------------------------------------------------------


def test_plain_tcp_where_there_is_no_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "rdma_devices", list)
    assert choose_engine("auto") == choose_engine("sockets") == "sockets"


def test_nixl_where_it_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(nixl, "rdma_devices", lambda: ["mlx5_0"])
    monkeypatch.setattr(nixl, "installed", lambda: "nixl_cu13")
    assert choose_engine("auto") == choose_engine("nixl") == "nixl"
    assert choose_engine("sockets") == "sockets"
    monkeypatch.setattr(nixl, "installed", lambda: None)
    assert choose_engine("auto") == "sockets"
    assert "mlx5_0" in caplog.text and EXTRA in caplog.text
    with pytest.raises(UnsupportedError, match=r"odc-fsdp\[nixl\]"):
        choose_engine("nixl")


def test_interfaces_and_devices_are_found(tmp_path: os.PathLike[str]) -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None
    from pathlib import Path

    for name in ("mlx5_1", "mlx5_0"):
        (Path(tmp_path) / name).mkdir()
    assert rdma_devices(Path(tmp_path)) == ["mlx5_0", "mlx5_1"]
