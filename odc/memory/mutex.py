"""A lock in shared memory that survives the death of its holder: a robust process-shared pthread mutex.

When its holder is killed, the next rank that asks gets an error. What the holder left half-done cannot be repaired,
so the mutex stays poisoned for everyone, and the job restarts from its checkpoint.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from odc.errors import PeerLostError, UnsupportedError, WaitTimeoutError

MUTEX_BYTES = 64  # pthread_mutex_t takes 40 bytes on x86-64, 48 on aarch64
_ERRORCHECK, _ROBUST, _SHARED = 2, 1, 1  # PTHREAD_MUTEX_ERRORCHECK, PTHREAD_MUTEX_ROBUST, PTHREAD_PROCESS_SHARED
_SLICE_S = 0.1  # a wait is cut into slices, between which Ctrl-C is seen, and what the caller wants checked


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Pthread(NamedTuple):
    """`try_lock` and `unlock` never wait and keep the GIL; `lock_for` waits for some seconds without the GIL."""

    try_lock: Callable[[int], int]
    unlock: Callable[[int], int]
    lock_for: Callable[[int, float], int]


@cache
def _pthread() -> _Pthread:
    quick = ctypes.PyDLL(None)
    unlock = quick.pthread_mutex_unlock
    unlock.argtypes = [ctypes.c_void_p]
    # A timed lock whose time is long past, not pthread_mutex_trylock: glibc's (2.36) takes a poisoned mutex for good
    # while it reports ENOTRECOVERABLE, so the next caller would wait for the one that got the error.
    timed, past = quick.pthread_mutex_timedlock, ctypes.byref(_Timespec(0, 0))
    timed.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Timespec)]
    return _Pthread(lambda address: int(timed(address, past)), unlock, _waiter(ctypes.CDLL(None)))


def _waiter(libc: Any) -> Callable[[int, float], int]:
    """A timed lock by the monotonic clock where libc has it (glibc 2.30), else by the wall clock."""
    pointer, until = ctypes.c_void_p, ctypes.POINTER(_Timespec)
    if not hasattr(libc, "pthread_mutex_clocklock"):
        timed = libc.pthread_mutex_timedlock
        timed.argtypes = [pointer, until]
        return lambda address, seconds: int(timed(address, _at(time.time() + seconds)))
    clocked = libc.pthread_mutex_clocklock
    clocked.argtypes = [pointer, ctypes.c_int, until]
    return lambda address, seconds: int(clocked(address, time.CLOCK_MONOTONIC, _at(time.monotonic() + seconds)))


def _nothing() -> None:
    return


class RobustMutex:
    """The mutex at `address`, initialised once by its owner. Not recursive; released by the thread that acquired it.

    `address` is that of MUTEX_BYTES bytes, 8-byte aligned, which `keepalive` owns; `what` names in messages what it
    guards and whose it is.
    """

    __slots__ = ("_address", "_keepalive", "_what")

    def __init__(self, address: int, keepalive: object, what: str = "a lock in shared memory") -> None:
        self._address, self._keepalive, self._what = address, keepalive, what

    @staticmethod
    def initialize(address: int) -> None:
        """Create a free mutex in the memory at `address`, before any other process can see it."""
        if address % 8:
            raise ValueError(f"a mutex needs an 8-byte aligned address, not {address:#x}")
        libc = ctypes.PyDLL(None)
        attributes = ctypes.create_string_buffer(64)
        _must(libc.pthread_mutexattr_init(attributes), "pthread_mutexattr_init")
        _must(libc.pthread_mutexattr_setpshared(attributes, _SHARED), "pthread_mutexattr_setpshared")
        _must(libc.pthread_mutexattr_setrobust(attributes, _ROBUST), "pthread_mutexattr_setrobust")
        _must(libc.pthread_mutexattr_settype(attributes, _ERRORCHECK), "pthread_mutexattr_settype")
        _must(libc.pthread_mutex_init(ctypes.c_void_p(address), attributes), "pthread_mutex_init")
        libc.pthread_mutexattr_destroy(attributes)

    def acquire(self, timeout_s: float, check: Callable[[], None] = _nothing) -> None:
        """Take the lock; waits up to `timeout_s` seconds without the GIL. `check` is called meanwhile, and may raise to
        end that.

        Raises PeerLostError if a process died while it held the lock, now or earlier; WaitTimeoutError if it was not
        free in time; RuntimeError if this thread holds it already.
        """
        try:
            code = _pthread().try_lock(self._address)
            if code == errno.ETIMEDOUT:
                code = self._wait(timeout_s, check)
        except BaseException:
            _pthread().unlock(self._address)  # taken, if a signal's handler raised just then; else an error code
            raise
        if code:
            self._refuse(code, timeout_s)

    def _wait(self, timeout_s: float, check: Callable[[], None]) -> int:
        if math.isnan(timeout_s):
            raise ValueError("a timeout must be a number of seconds, not nan")
        pthread = _pthread()
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            step = max(0.0, min(left, _SLICE_S))
            code = pthread.lock_for(self._address, step)
            if code != errno.ETIMEDOUT or left <= step:
                return int(code)
            check()

    def _refuse(self, code: int, timeout_s: float) -> None:
        if code == errno.EOWNERDEAD:
            # We hold it now. Unlocking without pthread_mutex_consistent makes it ENOTRECOVERABLE for everyone.
            _pthread().unlock(self._address)
        if code in (errno.EOWNERDEAD, errno.ENOTRECOVERABLE):
            raise PeerLostError(
                f"a process died while it held {self._what}; what it guards may be half-written, "
                "restart from the last checkpoint"
            )
        if code == errno.ETIMEDOUT:
            raise WaitTimeoutError(f"{self._what} was not free within {timeout_s:g} s")
        if code == errno.EDEADLK:
            raise RuntimeError(f"this thread holds {self._what} already")
        raise OSError(code, f"cannot take {self._what}: {os.strerror(code)}")

    def release(self) -> None:
        """Release the lock; RuntimeError if this thread does not hold it."""
        code = _pthread().unlock(self._address)
        if code:
            raise RuntimeError(f"this thread does not hold {self._what} ({os.strerror(code)})")

    def held(self, timeout_s: float, check: Callable[[], None] = _nothing) -> _Held:
        """As a context manager: acquires as `acquire` does, and releases at the end of the block."""
        return _Held(self, timeout_s, check)


class _Held:
    """A class, because `contextlib.contextmanager` would cost as much again as the lock."""

    __slots__ = ("_check", "_mutex", "_timeout_s")

    def __init__(self, mutex: RobustMutex, timeout_s: float, check: Callable[[], None]) -> None:
        self._mutex, self._timeout_s, self._check = mutex, timeout_s, check

    def __enter__(self) -> None:
        self._mutex.acquire(self._timeout_s, self._check)

    def __exit__(self, *_: object) -> None:
        self._mutex.release()


def _at(seconds: float) -> _Timespec:
    nanoseconds = int(seconds * 1e9)
    return _Timespec(nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000)


def _must(code: int, call: str) -> None:
    if code:
        raise UnsupportedError(f"robust process-shared mutexes are not available here: {call}: {os.strerror(code)}")
