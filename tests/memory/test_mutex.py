from __future__ import annotations

import ctypes
import errno
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.heaps import shm_group
from support.rank_worker import die, report
from support.ranks import spawn_ranks

from odc.errors import PeerLostError, WaitTimeoutError
from odc.memory import MUTEX_BYTES, RobustMutex, ShmHeap, mutex


@pytest.fixture
def lock() -> RobustMutex:
    memory = (ctypes.c_int64 * (MUTEX_BYTES // 8))()
    RobustMutex.initialize(ctypes.addressof(memory))
    return RobustMutex(ctypes.addressof(memory), memory, "the accumulator of unit 'a' on rank 3")


def in_thread(function: Any) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive()


def test_free_again_after_each_block_however_it_ends(lock: RobustMutex) -> None:
    for _ in range(3):
        with lock.held(1.0):
            pass
    with pytest.raises(KeyError), lock.held(1.0):
        raise KeyError
    in_thread(lambda: (lock.acquire(0.0), lock.release()))
    lock.acquire(0.0)
    lock.release()


def test_the_deadline_is_kept_and_named(lock: RobustMutex) -> None:
    begin = threading.Barrier(2)
    end = threading.Event()

    def hold() -> None:
        with lock.held(1.0):
            begin.wait()
            end.wait(60.0)

    thread = threading.Thread(target=hold)
    thread.start()
    begin.wait()
    for timeout_s in (0.0, 0.02, 0.25):
        start = time.monotonic()
        with pytest.raises(WaitTimeoutError, match=rf"unit 'a' on rank 3 was not free within {timeout_s:g} s"):
            lock.acquire(timeout_s)
        assert time.monotonic() - start >= timeout_s
    with pytest.raises(ValueError, match="nan"):
        lock.acquire(float("nan"))
    end.set()
    with lock.held(60.0):  # handed over
        pass
    thread.join()


def test_what_is_checked_while_a_lock_is_held_ends_the_wait(lock: RobustMutex) -> None:
    asked = list[int]()

    def check() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise KeyError("the job has ended")

    def wait() -> None:
        with pytest.raises(KeyError, match="the job has ended"), lock.held(600.0, check):
            raise AssertionError("it was not free")

    lock.acquire(1.0, check)
    in_thread(wait)
    lock.release()
    assert asked == [1, 1], "never of a lock that is free"


@pytest.mark.parametrize("free", [True, False])
def test_a_signal_as_the_lock_is_taken_leaves_it_free(lock: RobustMutex, monkeypatch, free: bool) -> None:
    """What its handler raises comes once the call has returned, with the lock held, before anything knows of it."""
    pthread = mutex._pthread()

    def taken_as_a_signal_comes(address: int, seconds: float = 0.0) -> int:
        assert pthread.try_lock(address) == 0
        raise KeyboardInterrupt

    at_once = taken_as_a_signal_comes if free else lambda address: errno.ETIMEDOUT
    late = pthread._replace(try_lock=at_once, lock_for=taken_as_a_signal_comes)
    with monkeypatch.context() as patched:
        patched.setattr(mutex, "_pthread", lambda: late)
        with pytest.raises(KeyboardInterrupt):
            lock.acquire(1.0)
    lock.acquire(0.0)
    lock.release()


def test_the_wall_clock_will_do_where_libc_has_nothing_better(lock: RobustMutex, monkeypatch) -> None:
    class OldLibc:
        pthread_mutex_timedlock = ctypes.CDLL(None).pthread_mutex_timedlock

    found = mutex._pthread()._replace(lock_for=mutex._waiter(OldLibc))
    monkeypatch.setattr(mutex, "_pthread", lambda: found)
    test_the_deadline_is_kept_and_named(lock)


def test_misuse_is_refused(lock: RobustMutex) -> None:
    with pytest.raises(RuntimeError, match="does not hold"):
        lock.release()
    with lock.held(1.0):
        with pytest.raises(RuntimeError, match=r"holds .* already"):
            lock.acquire(1.0)
        failures: list[str] = []

        def release() -> None:
            try:
                lock.release()
            except RuntimeError as error:
                failures.append(str(error))

        in_thread(release)
        assert len(failures) == 1, "another thread gave it back"
    with pytest.raises(ValueError, match="aligned"):
        RobustMutex.initialize(12345)


def test_a_holder_that_ends_poisons_it_for_ever(lock: RobustMutex) -> None:
    in_thread(lambda: lock.acquire(1.0))
    asked: list[str] = []

    def ask() -> None:
        with pytest.raises(PeerLostError, match="died while it held") as failure:
            lock.acquire(1.0)
        asked.append(str(failure.value))

    for _ in range(3):
        ask()
        in_thread(ask)  # a thread that was notified must not hold it
    assert len(asked) == 6
    assert "the accumulator of unit 'a' on rank 3" in asked[0]


def test_the_mutex_fits() -> None:
    """Nothing is written behind MUTEX_BYTES."""
    memory = torch.full((4 * MUTEX_BYTES,), 0x5A, dtype=torch.uint8)
    RobustMutex.initialize(memory.data_ptr())
    held = RobustMutex(memory.data_ptr(), memory)
    with held.held(1.0):
        pass
    assert memory[MUTEX_BYTES:].eq(0x5A).all()


@contextmanager
def shared(identity: str, rank: int, world: int) -> Iterator[tuple[ShmHeap, RobustMutex]]:
    """Every rank's heap and the mutex in rank 0's."""
    with shm_group(identity, tuple(range(world)), rank, 60.0) as heap:
        heap.allocate("mutex", MUTEX_BYTES)
        heap.allocate("words", 64)
        heap.seal()
        if rank == 0:
            RobustMutex.initialize(heap.address(0, "mutex"))
            heap.words(0, "words").store(7, 1)
        while not heap.words(0, "words").load(7):
            time.sleep(0.001)
        yield heap, RobustMutex(heap.address(0, "mutex"), heap.words(0, "mutex"))


def count_under_lock(rank: int, world: int, identity: str, rounds: int) -> int:
    import torch.distributed as dist

    with shared(identity, rank, world) as (heap, held):
        words = heap.words(0, "words")
        dist.barrier()
        for _ in range(rounds):
            with held.held(60.0):
                before = words.load(0)
                words.store(1, rank)  # more room for another process to come between
                words.store(0, before + 1)
                assert words.load(1) == rank, "two processes were inside"
        dist.barrier()
        total = words.load(0)
        dist.barrier()
    return total


def test_processes_exclude_each_other(ranks) -> None:
    assert ranks(3).run(count_under_lock, uuid.uuid4().hex[:12], 1000) == [3000] * 3


def die_holding(rank: int, world: int, identity: str) -> list[str]:
    """Rank 1 takes the lock in rank 0's heap and is killed while rank 0 waits for it, and rank 2 asks later."""
    with shared(identity, rank, world) as (heap, held):
        words = heap.words(0, "words")
        if rank == 1:
            held.acquire(60.0)
            words.store(0, 1)
            while not words.load(1):
                time.sleep(0.001)
            time.sleep(0.05)  # rank 0 waits inside by now
            die()
        while not words.load(0):
            time.sleep(0.001)
        errors = []
        for _ in range(2):
            words.store(1, int(rank == 0) or words.load(1))
            try:
                held.acquire(60.0)
            except PeerLostError as error:
                errors.append(str(error))
        report(errors)
        while rank == 0 and not words.load(2):  # rank 0's listener stays open until rank 2 is connected
            time.sleep(0.001)
        words.store(2, 1)
        return errors


def test_every_rank_learns_that_the_holder_was_killed() -> None:
    with spawn_ranks(3, die_holding, uuid.uuid4().hex[:12]) as job:
        outcomes = job.wait()
    assert outcomes[1].exit_code == -9
    for rank in (0, 2):
        assert len(outcomes[rank].value or []) == 2, outcomes[rank].describe()
