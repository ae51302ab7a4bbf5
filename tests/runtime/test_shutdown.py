"""Twin of odc/runtime/releases.py and leave.py."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.sides import LAYOUT, RANKS, Side, settle
from support.silent import SilentStore
from support.waiting import until

from odc.errors import LayoutMismatchError, OdcError, PeerLostError, WaitTimeoutError
from odc.net import announced
from odc.protocol import Word
from odc.runtime import shutdown
from odc.settings import Settings

Make = Callable[..., Side]


def left(one: Side) -> Callable[[], None]:
    return one.leave()


def is_open(one: Side) -> bool:
    return one.heap._fd >= 0  # type: ignore[attr-defined]


def test_a_heap_stays_until_the_slow_peer_has_attached(side: Make) -> None:
    fast, slow = side(0).announce(), side(1).announce()
    fast.layout.peer(0).published(fast.units[0], 0).fill_(7.0)
    fast.layout.peer(1).attach()
    wait = left(fast)
    fast.daemon.notify()
    waiter = threading.Thread(target=wait)
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive() and is_open(fast)
    assert slow.layout.peer(0).published(slow.units[0], 0).tolist() == [7.0] * 8
    waiter.join(60.0)
    assert not waiter.is_alive()
    assert not is_open(fast)


def test_a_peer_that_leaves_without_having_attached_is_not_waited_for(side: Make) -> None:
    """Neither had anything to fetch: each learns from the store that the other needs nothing."""
    one, other = side(0).announce(), side(1).announce()
    waits = [left(one), left(other)]
    for wait in waits:
        wait()
    assert not is_open(one) and not is_open(other)


def test_a_peer_that_dies_is_not_waited_for(side: Make, store: Any) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"]) as peer:
        store.set(f"odc/process/{RANKS[1]}", json.dumps([peer.pid, announced._namespace()]))
        fast = side(0, settings=Settings(timeout_s=600.0)).announce()
        wait = left(fast)
        waiter = threading.Thread(target=wait)
        waiter.start()
        waiter.join(0.2)
        assert waiter.is_alive()
        peer.kill()
        waiter.join(60.0)
        assert not waiter.is_alive()
    assert not is_open(fast)


def test_a_device_that_does_not_end_its_work_is_named_at_the_deadline(
    side: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown.HeapRelease, "_begin_to_give_back", lambda release: None)
    only = side(0, settings=Settings(timeout_s=0.3))
    with pytest.raises(WaitTimeoutError, match=r"rank 10, leaving heap 7\.abc: its device has not ended"):
        left(only)()
    only.heap.close()


def test_a_peer_that_does_neither_is_named_at_the_deadline(side: Make) -> None:
    fast = side(0, settings=Settings(timeout_s=0.3)).announce()
    side(1).announce()
    with pytest.raises(WaitTimeoutError, match=r"rank 10, leaving heap 7\.abc: rank 13 has neither attached") as late:
        left(fast)()
    assert late.value.culprit == 13
    assert not is_open(fast)


def test_a_peer_that_was_given_up_is_named_where_no_thread_waits(side: Make, caplog: pytest.LogCaptureFixture) -> None:
    """As for a model that was dropped long before the rank shuts down."""
    fast = side(0, settings=Settings(timeout_s=0.3)).announce()
    side(1).announce()
    left(fast)
    until(lambda: not fast.daemon.releases._added)
    assert "rank 13 has neither attached" in caplog.text
    fast.daemon.releases.wait()


def test_a_job_that_was_aborted_does_not_wait_and_leaves_the_reason(side: Make, store: Any) -> None:
    fast, slow = side(0, settings=Settings(timeout_s=600.0)).announce(), side(1).announce()
    fast.service.abort("ValueError: no words left", 10)
    left(fast)()
    assert not is_open(fast)
    with pytest.raises(PeerLostError, match="was aborted by rank 10: ValueError: no words left"):
        slow.layout.peer(0).attach()


def test_an_abort_ends_the_release_of_a_heap_that_waits_for_a_silent_store() -> None:
    """As where the host of the store is cut off; the reason is left all the same, should the store answer again."""
    store, reports = SilentStore(silent=False), list[tuple[str, int]]()

    def aborted(doing: str) -> None:
        fast.protocol.waiter.check(doing)

    fast = Side(store, 0, settings=Settings(timeout_s=600.0), aborted=aborted).announce()
    fast.meet.report = lambda *found: reports.append(found)  # type: ignore[method-assign]
    store.silent = True
    wait = left(fast)
    assert store.asked.wait(60.0)
    fast.service.abort("rank 13 died", 13)
    wait()
    assert not is_open(fast)
    assert reports == [("rank 13 died", 13)]
    assert not store.waited, "the wait for the store ends only with it"
    store.silent = False
    fast.close()


def test_a_peer_that_waits_in_vain_learns_the_last_error_of_the_rank(side: Make) -> None:
    one, other = side(0).announce(), side(1).announce()
    other.layout.peer(0).attach()
    one.leave("KeyError: 'page'")

    with pytest.raises(PeerLostError, match=r"rank 10 has left the job .*; the last error there was KeyError: 'page'"):
        other.protocol.waiter.until(lambda: False, 0, "rank 10 to finish epoch 1")


def test_nothing_stays_in_the_store(side: Make, store: Any) -> None:
    for number in range(3):
        two = [side(me, identity=f"{number}.abc").announce(calls=[number]) for me in (0, 1)]
        for one in two:
            one.protocol.attach_all()
        for wait in [left(one) for one in two]:
            wait()
    kept = [key for key in store.list_keys() if "roots" not in key]
    assert kept == []
    assert {store.get(f"odc/roots/abc/{rank}") for rank in RANKS} == {b"{}"}


def test_the_keys_stay_as_long_as_a_peer_may_read_them(side: Make, store: Any) -> None:
    fast, slow = side(0).announce(), side(1).announce()
    fast.layout.peer(1).attach()
    slow.layout.peer(0).attach()
    left(fast)()
    assert store.check(["odc/7.abc/10", "odc/7.abc/13"])
    left(slow)()
    assert store.list_keys() == []


def test_heaps_that_are_left_when_the_daemon_stops_are_closed(side: Make) -> None:
    fast = side(0, settings=Settings(timeout_s=600.0)).announce()
    side(1).announce()
    left(fast)
    fast.daemon.close()
    until(lambda: not is_open(fast))
    late = side(1, identity="8.abc").announce()
    late.daemon.close()
    left(late)()
    assert not is_open(late)


def test_no_peer_waits_for_a_rank_whose_daemon_stopped_and_which_lives_on(
    side: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that shuts down after an error in another root, which it had caught."""
    one, other = side(0).announce(), side(1).announce()
    with monkeypatch.context() as patched:
        patched.setattr(shutdown.HeapRelease, "check", lambda release: False)
        left(other)
        other.daemon.close()
    until(lambda: not is_open(other))
    left(one)()
    assert not is_open(one)


class LaterLanes:
    """Stands in for those of a device."""

    asynchronous = True
    lane = staticmethod(lambda name: contextlib.nullcontext())


def test_memory_is_given_back_where_no_thread_can_be_started(side: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_background(name: str, work: Callable[[], None]) -> None:
        if name == "odc-close":
            raise RuntimeError("can't start new thread")
        started(name, work)

    one, other = side(0).announce(), side(1).announce()
    started = shutdown.in_background
    monkeypatch.setattr(shutdown, "in_background", in_background)
    monkeypatch.setattr(one.heap, "lanes", LaterLanes)
    wait = left(one)
    left(other)()
    wait()
    assert not is_open(one) and one.daemon.alive()


def no_thread(name: str, work: Callable[[], None]) -> None:
    """Stands in for `in_background`."""
    raise RuntimeError("can't start new thread")


def test_releases_that_got_no_thread_are_served_by_whoever_waits(side: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = side(0).announce(), side(1).announce()
    with monkeypatch.context() as patched:
        patched.setattr(shutdown, "in_background", no_thread)
        left(one)
        left(other)
    waiters = [threading.Thread(target=at.daemon.releases.wait, daemon=True) for at in (one, other)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join(20.0)
    assert not is_open(one) and not is_open(other)


def test_a_release_that_got_no_thread_is_served_by_whoever_waits_for_it(
    side: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for an arena that is closed; of two that wait, the one that serves may be done first."""
    one, other = side(0).announce(), side(1).announce()
    monkeypatch.setattr(shutdown, "in_background", no_thread)
    waits = [left(one), left(other)]
    waiters = [threading.Thread(target=wait, daemon=True) for wait in (*waits, one.daemon.releases.wait)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join(20.0)
    assert not any(waiter.is_alive() for waiter in waiters)
    assert not is_open(one) and not is_open(other)


def test_heaps_that_got_no_thread_are_closed_when_the_daemon_stops(side: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = side(0, settings=Settings(timeout_s=600.0)).announce(), side(1).announce()
    monkeypatch.setattr(shutdown, "in_background", no_thread)
    left(one)
    one.daemon.close()
    until(lambda: not is_open(one), within_s=20.0)


def test_the_daemon_goes_on_while_memory_waits_for_its_device(side: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may compute for long, for another root; whoever shuts down waits until the memory is given back."""
    one, other = side(0).announce(), side(1).announce()
    closing, idle, close = threading.Event(), threading.Event(), one.heap.close
    monkeypatch.setattr(one.heap, "lanes", LaterLanes)
    monkeypatch.setattr(one.heap, "close", lambda: (closing.set(), idle.wait(120.0), close()))
    wait = left(one)
    left(other)()
    waiters = [threading.Thread(target=waiting) for waiting in (wait, one.daemon.releases.wait)]
    try:
        assert closing.wait(60.0)
        settle(one.daemon)
        for waiter in waiters:
            waiter.start()
            waiter.join(0.2)
        assert all(waiter.is_alive() for waiter in waiters) and is_open(one)
    finally:
        idle.set()
    for waiter in waiters:
        waiter.join(60.0)
    assert not is_open(one)


def test_a_doorbell_is_not_closed_while_it_is_written(side: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late notification would write to whatever has the descriptor's number next."""
    one, _ = side(0).announce(), side(1).announce()
    one.layout.peer(1).attach()
    ringing, closing, still_open = threading.Event(), threading.Event(), list[bool]()

    mine, write = set(one.meet.doorbells.values()), os.eventfd_write

    def slow_write(fd: int, value: int) -> None:
        if fd not in mine:
            return write(fd, value)
        ringing.set()
        closing.wait(60.0)
        closer.join(0.2)
        still_open.append(fd in one.meet.doorbells.values())
        return None

    monkeypatch.setattr("os.eventfd_write", slow_write)
    closer = threading.Thread(target=lambda: (closing.set(), one.meet.close()))
    ringer = threading.Thread(target=one.meet.notify, args=(1,))
    ringer.start()
    assert ringing.wait(60.0)
    closer.start()
    ringer.join(60.0)
    closer.join(60.0)
    assert still_open == [True]
    monkeypatch.undo()
    with pytest.raises(OdcError, match="has left the job"):
        one.meet.notify(1)


# other roots ---------------------------------------------------------------------------------------------------------


def test_another_number_of_units_is_named_at_once_on_both_sides(side: Make) -> None:
    """The root is named by the number of its call, so another number of units makes another name."""
    patient = Settings(timeout_s=600.0)
    two = side(0, settings=patient, identity="1.abc").announce(calls=[0, 1])
    three = side(1, [*LAYOUT, LAYOUT[1]], settings=patient, identity="2.abc").announce(calls=[0, 1, 2])
    for one, peer, mine, theirs in ((two, 1, 2, 3), (three, 0, 3, 2)):
        me, other = one.service.rank, RANKS[peer]
        with pytest.raises(
            LayoutMismatchError, match=f"differently: rank {me} has {mine} units, rank {other} has {theirs}$"
        ):
            one.layout.peer(peer).attach()


def test_another_model_of_the_peer_is_no_mismatch(side: Make) -> None:
    """Ranks may run their models in any order."""
    side(1, identity="9.abc").announce(calls=[8, 9])
    one = side(0, settings=Settings(timeout_s=0.3), identity="7.abc").announce(calls=[6, 7])
    with pytest.raises(WaitTimeoutError, match="waiting for rank 13 to come up"):
        one.layout.peer(1).attach()


def test_a_model_sharded_before_on_one_rank_is_named(side: Make) -> None:
    side(1, identity="1.abc").announce(calls=[0, 1])
    one = side(0, [*LAYOUT], settings=Settings(timeout_s=600.0), identity="2.abc").announce(calls=[1, 2])
    with pytest.raises(LayoutMismatchError, match="rank 13 has called fully_shard on other modules before"):
        one.layout.peer(1).attach()


def test_another_root_counts_no_more_once_it_is_left(side: Make, store: Any) -> None:
    two = [side(me, identity="4.abc").announce(calls=[4]) for me in (0, 1)]
    for wait in [left(one) for one in two]:
        wait()
    again = [side(me, identity="5.abc").announce(calls=[4, 5]) for me in (0, 1)]
    again[0].layout.peer(1).attach()
    again[1].layout.peer(0).attach()


def test_an_unforeseen_error_closes_the_heap_and_not_the_thread(
    side: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = side(0, identity="7.abc").announce(), side(0, identity="8.abc").announce()
    monkeypatch.setattr(one.meet, "unsettled", lambda members: 1 / 0)
    left(one)()
    assert not is_open(one)
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.setattr(other.meet, "unsettled", lambda members: [])
    left(other)()
    assert not is_open(other), "the thread looks after the next one"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_release_whose_step_fails_takes_the_others_and_ends_the_wait(
    side: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = side(0, identity="9.abc").announce()
    monkeypatch.setattr(one.meet, "unsettled", lambda members: [])
    monkeypatch.setattr(one.meet, "close", lambda: 1 / 0)
    wait = left(one)
    waiter = threading.Thread(target=wait)
    waiter.start()
    waiter.join(60.0)
    assert not waiter.is_alive() and not is_open(one)


def test_a_peer_whose_job_was_aborted_is_not_waited_for(side: Make) -> None:
    """It settles never. This rank has not attached to it, so nothing but the store says that it has gone."""
    aborted, waiting = side(0).announce(), side(1).announce()
    aborted.layout.peer(0).board.store(Word.ABORT, 1 + RANKS[0])
    left(aborted)()
    left(waiting)()
    assert not is_open(waiting)
