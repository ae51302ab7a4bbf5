from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from support.silent import SilentStore
from support.together import RANKS, run_together

from odc.errors import PeerLostError, WaitTimeoutError
from odc.eval import Peers, plain
from odc.net import mailbox


def test_exchange_and_messages_of_any_size():
    sizes = [0, 1, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 3 << 20]

    def talk(peers: Peers) -> Any:
        everyone = peers.exchange(("hello", peers.rank), "greetings")
        if peers.me == 0:
            for size in sizes:
                peers.send(2, b"x" * size, "letters")
            return everyone
        got = [peers.receive(0, "letters") for _ in sizes] if peers.me == 2 else []
        return everyone, [len(one) for one in got], set(b"".join(got))

    first, second, third = run_together(3, talk)
    greetings = [("hello", rank) for rank in RANKS[:3]]
    assert first == greetings
    assert second == (greetings, [], set())
    assert third == (greetings, sizes, {ord("x")})


def test_what_goes_back_to_all_is_encoded_once(monkeypatch):
    encoded, real = [], plain.dumps

    def noted(values: Any, what: str) -> bytes:
        encoded.append(len(values))
        return real(values, what)

    monkeypatch.setattr(plain, "dumps", noted)
    run_together(3, lambda peers: peers.exchange(peers.rank, "numbers"))
    assert sorted(encoded) == [1, 1, 1, 3], "each its own, and the first the reply"


class Watched:
    """A store that counts the bytes of messages that lie in it, and records when their sender waits."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.lying, self.most, self.waits = dict[str, int](), 0, threading.Event()

    def set(self, key: str, value: Any) -> None:
        if key.startswith("data/"):
            self.lying[key] = len(value)
            self.most = max(self.most, sum(self.lying.values()))
        self._store.set(key, value)

    def delete_key(self, key: str) -> bool:
        self.lying.pop(key, None)
        return self._store.delete_key(key)

    def check(self, keys: list[str]) -> bool:
        found = self._store.check(keys)
        if found and keys[0].startswith("data/"):
            self.waits.set()
        return found

    def clone(self) -> Watched:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_sender_runs_ahead_by_a_megabyte_and_no_more():
    """No rank reads until the sender waits, or has sent all of its five megabytes."""
    store = Watched()

    def send() -> None:
        try:
            Peers(store, RANKS[:2], 1, 3600.0).send(0, b"x" * (5 << 20), "a letter")
        finally:
            store.waits.set()

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    store.waits.wait()
    assert (1 << 20) - (256 << 10) <= sum(store.lying.values()) <= (1 << 20) + 100, "what lies there, with a few marks"
    assert len(Peers(store, RANKS[:2], 0, 3600.0).receive(1, "a letter")) == 5 << 20
    sender.join()
    assert store.most <= (1 << 20) + 100
    assert not store.lying


def test_a_failure_ends_every_wait_and_names_the_rank():
    def work(peers: Peers) -> Any:
        if peers.me == 1:
            raise KeyError("no such document")
        if peers.me == 2:
            return peers.receive(1, "a letter")
        return peers.meet("the corner")

    first, second, third = run_together(3, work, timeout_s=3600.0)
    assert isinstance(second, KeyError)
    for error, rank, doing in ((first, 4, "the corner"), (third, 9, "a letter")):
        assert isinstance(error, PeerLostError) and error.culprit == 7
        assert str(error) == (
            f"rank {rank}, waiting for {doing}: rank 7 failed in the evaluation: KeyError: 'no such document'"
        )


def test_a_failure_is_one_call_and_the_first_stays():
    """Of two calls a slow store may take only the first in time, and the others would wait for their deadline."""
    store, calls = Watched(), list[str]()
    peers = Peers(Counted(store, calls), RANKS[:2], 1, 60.0)
    peers.fail(ValueError("first"))
    assert calls == ["compare_set"]
    assert peers.fail(ValueError("second")) == (RANKS[1], "ValueError: first")
    assert peers.failed() == (RANKS[1], "ValueError: first")


@pytest.mark.parametrize("silent", [False, True])
def test_the_end_of_the_job_ends_a_wait_whether_or_not_the_store_answers(silent: bool):
    """The other member is there, and stands still; the store may be on a host that is cut off."""
    store, waits = SilentStore(silent=False), list[str]()

    def check(doing: str) -> None:
        waits.append(doing)
        store.silent = silent
        if len(waits) > 3:
            raise PeerLostError(f"rank 4, {doing}: the job was aborted by rank 7", culprit=7)

    peers = Peers(store, RANKS[:2], 0, 60.0, check=check)
    doing = "asking the job's store" if silent else "waiting for a letter"
    with pytest.raises(PeerLostError, match=f"rank 4, {doing}: the job was aborted by rank 7"):
        peers.receive(1, "a letter")
    assert not store.waited
    store.silent = False


def test_a_failure_is_left_in_a_silent_store_only_for_a_moment(monkeypatch):
    monkeypatch.setattr(mailbox, "STORE_LEAST_S", 0.2)
    store = SilentStore()
    with pytest.raises(WaitTimeoutError, match=r"store has not answered for 0\.2 s"):
        Peers(store, RANKS[:2], 1, 60.0).fail(KeyError("no such document"))
    store.silent = False


class Counted:
    """A store that records the names of its calls."""

    def __init__(self, store: Watched, calls: list[str]) -> None:
        self._store, self._calls = store, calls

    def clone(self) -> Counted:
        return self

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)

        def call(*args: Any) -> Any:
            self._calls.append(name)
            return found(*args)

        return call


def test_a_rank_that_stands_still_is_named_by_all():
    """Rank 9 never comes: 4 waits for it, and 7 for 4; none blames 4."""
    gone = threading.Event()

    def work(peers: Peers) -> Any:
        if peers.me == 2:
            gone.wait(60.0)
            return None
        try:
            peers.meet("the corner")
        except WaitTimeoutError as error:
            return error
        except PeerLostError as error:
            return error
        finally:
            if peers.me == 1:
                gone.set()

    def patient(peers: Peers) -> Any:
        peers.timeout_s = [3.0, 5.0, 6.0][peers.me]
        return work(peers)

    first, second, _ = run_together(3, patient)
    assert isinstance(first, WaitTimeoutError) and first.culprit == 9
    assert str(first).startswith("rank 4, waiting for the corner: rank 9 has made no progress for 3 s; raise")
    assert isinstance(second, WaitTimeoutError) and second.culprit == 9
    assert "rank 4 has made no progress for 5 s; it waits for rank 9 itself" in str(second)


@pytest.mark.parametrize("other", ["receives", "leaves"])
def test_two_that_wait_for_each_other_end_by_the_deadline(other: str):
    """Rank 4 waits for a message of 7, which waits for one of 4, or for 4 to leave."""

    def work(peers: Peers) -> Any:
        if peers.me == 0 or other == "receives":
            return peers.receive(1 - peers.me, "a letter")
        return peers.leave("the end")

    errors = run_together(2, work, timeout_s=1.0)
    late = [error for error in errors if isinstance(error, WaitTimeoutError)]
    assert late, errors
    for error in late:
        assert error.culprit == RANKS[1 - errors.index(error)]
        assert "has made no progress for 1 s; raise timeout_s" in str(error)


def test_a_rank_that_was_waited_for_before_is_not_blamed():
    """Rank 4 waits for 9, which comes; then 4 stands still, and 7 waits for it."""
    done = threading.Event()

    def work(peers: Peers) -> Any:
        peers.timeout_s = 8.0
        if peers.me == 2:
            while not peers._store.check(["waits/0"]):  # until rank 4 has waited long enough to report it
                time.sleep(0.01)
            peers.send(0, b"late", "a letter")
        if peers.me == 0:
            peers.receive(2, "a letter")
            done.wait(60.0)
        if peers.me == 1:
            try:
                peers.receive(0, "a letter")
            except WaitTimeoutError as error:
                return error
            finally:
                done.set()
        return None

    _, error, _ = run_together(3, work)
    assert isinstance(error, WaitTimeoutError) and error.culprit == 4
    assert "rank 4 has made no progress for 8 s; raise timeout_s" in str(error)


def test_progress_starts_the_deadline_anew_also_for_those_behind():
    """Rank 9 computes for longer than the timeout, ticking; rank 7 waits for rank 4, which waits for 9."""

    def work(peers: Peers) -> Any:
        if peers.me == 2:
            end = time.monotonic() + 5.0
            while time.monotonic() < end:
                peers.tick()
                time.sleep(0.02)
        peers.leave("the end")
        return "well"

    assert run_together(3, work, timeout_s=4.0) == ["well"] * 3


def test_the_first_rank_may_work_alone_for_longer_than_the_timeout():
    """Until it sends something, which rank 4 does once rank 7 has waited for longer; then the timeout counts again."""
    waited = threading.Event()

    def work(peers: Peers) -> Any:
        if peers.me == 0:
            waited.wait(60.0)
            peers.send(1, b"late", "a letter")
            return None
        checks: list[str] = []

        def note(doing: str) -> None:
            checks.append(doing)
            if len(checks) > 20:
                waited.set()

        peers.timeout_s, peers._refuse = 1e-6, note
        peers.let_first_work()
        late = peers.receive(0, "a letter")
        with pytest.raises(WaitTimeoutError, match="rank 4 has made no progress for 1e-06 s"):
            peers.receive(0, "a letter")
        return late

    assert run_together(2, work) == [None, b"late"]


def test_nothing_stays_in_the_store():
    store: Any = dist.HashStore()

    def work(peers: Peers) -> Any:
        peers.exchange(peers.me, "numbers")
        peers.tick()
        peers.meet("half way")
        peers.leave("the end")

    assert run_together(4, work, store=store) == [None] * 4
    assert store.list_keys() == []
