"""The job's store: calls that end, and keys that are awaited."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.rank_worker import report
from support.ranks import RankProcesses, spawn_ranks

from odc.errors import PeerLostError, WaitTimeoutError
from odc.memory import ProcessHandle
from odc.net import JobStore


class Silent:
    """A store whose server has stopped: every call waits until it is let go."""

    def __init__(self) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()
        self.made: list[str] = []

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        self.answer.wait(60.0)
        self.made += keys
        return True

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.check([key])
        return value.encode()


@pytest.fixture
def silent() -> Iterator[Silent]:
    store = Silent()
    yield store
    store.answer.set()


def test_calls_reach_the_store_under_the_prefix() -> None:
    raw = dist.HashStore()
    store = JobStore(raw, 20.0, 3, "mine/")
    store.set("a", "1")
    assert raw.get("mine/a") == b"1" == store.get("a")
    assert store.check(["a"]) and not store.check(["a", "b"])
    assert [store.add("n", 2), store.add("n", 3)] == [2, 5]
    store.delete_key("a")
    assert not store.check(["a"])


@pytest.mark.parametrize(("hosts", "count", "begins"), [("1", "2", "attempt2/"), ("1", "0", ""), ("2", "1", "")])
def test_ranks_that_torchrun_has_started_again_have_keys_of_their_own(
    hosts: str, count: str, begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one host: over several, each torchrun counts for itself."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", hosts)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    made: Any = dist
    store = made.HashStore()
    JobStore(store, 5.0, prefix="a/").within(5.0).set("key", "1")
    JobStore(store, 5.0, prefix="a/", lasts=True).set("kept", "1")
    assert store.check([f"{begins}a/key"])
    assert store.check(["a/kept"])


def store_of(kind: str, tmp_path: Path) -> Any:
    """A store of torch, behind a prefix; its calls may wait for long."""
    made: dict[str, Callable[[], Any]] = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }
    raw = made[kind]()
    raw.set_timeout(timedelta(seconds=600))
    return dist.PrefixStore("job", raw)


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_a_key_that_is_not_there_is_found_missing_at_once(kind: str, tmp_path: Path) -> None:
    """And stays missing: torch's own `get` would wait for it, and with it every other call of this process."""
    store = JobStore(store_of(kind, tmp_path), 600.0, 3)
    assert store.find("a") is None
    assert not store.check(["a"]), "to look for a key must not make it"
    for value in ("", "1"):
        store.set("a", value)
        assert store.find("a") == value.encode() == store.get("a")
    store.delete_key("a")
    assert store.find("a") is None


def test_a_call_ends_at_the_deadline(silent: Silent) -> None:
    with pytest.raises(WaitTimeoutError, match=r"^rank 3: the job's key-value store has not answered for 0\.3 s"):
        JobStore(silent, 0.3, 3).check(["a"])
    assert silent.asked.wait(60.0)


def test_a_call_that_was_given_up_before_it_began_is_not_made(silent: Silent) -> None:
    def watch() -> None:
        if silent.asked.is_set():
            raise PeerLostError("the call has begun")

    with pytest.raises(PeerLostError, match="the call has begun"):
        JobStore(silent, 600.0, watch=watch).check(["begun"])
    store = JobStore(silent, 0.2)
    with pytest.raises(WaitTimeoutError):
        store.check(["waiting"])
    silent.answer.set()
    assert store.within(60.0).check(["last"])
    assert silent.made == ["begun", "last"]


def test_the_watch_ends_a_call(silent: Silent) -> None:
    def watch() -> None:
        raise PeerLostError("the job was aborted")

    with pytest.raises(PeerLostError, match="the job was aborted"):
        JobStore(silent, 600.0, watch=watch).check(["a"])


class Cloned(Silent):
    """A store that answers, and counts the connections that are made to it."""

    def __init__(self) -> None:
        super().__init__()
        self.answer.set()
        self.clones = 0

    def clone(self) -> Silent:
        self.clones += 1
        clone = Silent()
        clone.answer.set()
        return clone


def test_a_connection_lasts_as_long_as_the_store() -> None:
    before, raw = set(threading.enumerate()), Cloned()
    for _ in range(3):  # no user lives longer than its call
        assert JobStore(raw, 20.0).check(["a"])
        gc.collect()
    assert raw.clones == 1 and not raw.made
    threads = [one for one in threading.enumerate() if one.name == "odc-store" and one not in before]
    assert len(threads) == 1
    del raw
    gc.collect()
    threads[0].join(60.0)
    assert not threads[0].is_alive()


class TestAwaitKey:
    def test_returns_the_value_once_another_rank_sets_it(self) -> None:
        raw, checks = dist.HashStore(), list[int]()

        def check() -> None:
            checks.append(1)
            if len(checks) == 3:
                raw.set("mine/a", "1")

        assert JobStore(raw, 60.0, prefix="mine/").await_key("a", "late", check=check) == b"1"
        assert len(checks) == 3
        assert JobStore(raw, 60.0, prefix="mine/").await_key("a", "late", check=check) == b"1"
        assert len(checks) == 3, "nothing is checked where the key is there"

    def test_the_check_ends_it(self) -> None:
        def check() -> None:
            raise PeerLostError("rank 3 has ended", culprit=3)

        with pytest.raises(PeerLostError, match="rank 3 has ended"):
            JobStore(dist.HashStore(), 600.0).await_key("a", "late", check=check)

    @pytest.mark.parametrize(("stores", "given"), [(0.05, None), (600.0, 0.05)])
    def test_the_deadline_ends_it_and_the_culprit_is_named(self, stores: float, given: float | None) -> None:
        with pytest.raises(WaitTimeoutError, match="^rank 3 is late$") as late:
            JobStore(dist.HashStore(), stores).await_key("a", "rank 3 is late", culprit=3, timeout_s=given)
        assert late.value.culprit == 3

    def test_a_store_that_does_not_answer_ends_it(self, silent: Silent) -> None:
        with pytest.raises(WaitTimeoutError, match="store has not answered"):
            JobStore(silent, 0.2).await_key("a", "rank 3 is late", culprit=3, timeout_s=600.0)


class Counting:
    """A store of this process without `clone`; `calls` names those that are made of it."""

    def __init__(self, raw: Any) -> None:
        self._raw, self.calls = raw, list[str]()

    def __getattr__(self, name: str) -> Any:
        if name in ("clone", "underlying_store"):
            raise AttributeError(name)
        if name in ("check", "get", "compare_set", "multi_get"):
            self.calls.append(name)
        return getattr(self._raw, name, None)


class TestFindLeading:
    @pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
    def test_gives_the_values_up_to_the_first_key_that_is_not_there(self, kind: str, tmp_path: Path) -> None:
        store, keys = JobStore(store_of(kind, tmp_path), 600.0, prefix="mine/"), [str(i) for i in range(9)]
        assert store.find_leading([]) == store.find_leading(keys) == []
        for i, key in enumerate(keys):
            store.set(key, f"value {i}")
            assert store.find_leading(keys) == [b"value %d" % j for j in range(i + 1)]
        store.delete_key("4")
        for first in range(4):
            assert store.find_leading(keys[first:]) == [b"value %d" % j for j in range(first, 4)]

    def test_takes_few_calls_however_many_keys_there_are(self) -> None:
        raw = Counting(dist.HashStore())
        store, keys = JobStore(raw, 60.0), [str(i) for i in range(512)]
        assert not store.find_leading(keys)
        assert raw.calls == ["check"]
        for key in keys:
            store.set(key, key)
        raw.calls.clear()
        assert len(store.find_leading(keys)) == 512
        assert raw.calls == ["check"] * 10 + ["multi_get"]

    def test_the_watch_and_the_deadline_end_it(self, silent: Silent) -> None:
        def watch() -> None:
            raise PeerLostError("the job was aborted")

        with pytest.raises(PeerLostError, match="the job was aborted"):
            JobStore(silent, 600.0, watch=watch).find_leading(["a"])
        with pytest.raises(WaitTimeoutError, match="store has not answered"):
            JobStore(silent, 0.2).find_leading(["a"])


def host_a_store(rank: int, world: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    report(store.port)
    time.sleep(600)


@pytest.fixture
def host() -> Iterator[tuple[RankProcesses, Any]]:
    """A process that hosts a store, and the store."""
    with spawn_ranks(1, host_a_store) as process:
        process.until_reported(1)
        (port,) = process.outcomes[0].reports
        yield process, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=100))


def test_a_store_that_was_gone_before_this_process_connected_to_it(host: tuple[RankProcesses, Any]) -> None:
    """Connecting would be tried again until torch's own timeout."""
    process, raw = host
    raw.set_timeout(timedelta(seconds=600))
    process.kill(0)
    process.wait()
    store = JobStore(dist.PrefixStore("job", raw), 120.0, 5)
    with pytest.raises(
        PeerLostError, match=rf"^rank 5: .* at 127\.0\.0\.1:{raw.port} is gone .*: the process that hosts"
    ):
        store.check(["a"])


def test_a_store_whose_host_was_stopped_or_killed(host: tuple[RankProcesses, Any]) -> None:
    """A stopped one is silent: torch's own `check` would wait for as long as it is."""
    process, raw = host
    store = JobStore(dist.PrefixStore("job", raw), 1.0, 5)
    assert not store.within(60.0).check(["a"])
    os.kill(process.pids[0], signal.SIGSTOP)
    while Path(f"/proc/{process.pids[0]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    with pytest.raises(
        WaitTimeoutError, match=rf"^rank 5: .* store at 127\.0\.0\.1:{raw.port} has not answered for 1 s"
    ):
        store.check(["a"])
    os.kill(process.pids[0], signal.SIGCONT)
    assert not store.within(60.0).check(["a"])
    process.kill(0)
    process.wait()
    for _ in range(2):
        with pytest.raises(
            PeerLostError, match=r"^rank 5: .* is gone .*: the process that hosts it .* has ended"
        ) as lost:
            store.within(60.0).check(["a"])
        assert lost.value.culprit == 0
    store.processes[2] = ProcessHandle(process.pids[0])
    with pytest.raises(PeerLostError, match="the process of rank 2 has ended") as lost:
        store.within(60.0).check(["a"])
    assert lost.value.culprit == 2
