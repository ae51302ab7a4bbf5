"""64-bit words in memory that several processes share: flags, counters, heads and tails of rings.

Loads acquire and stores release: a thread that loads a word sees all that was written before its store. There is no
other ordering. A load or store costs one ctypes call; use `as_tensor` for bulk access.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from odc.memory.atomics import Atomics, default_atomics

_TOP = 1 << 63
_LOW, _ALL_WAITERS = (1 << 32) - 1, (1 << 31) - 1
_FUTEX = {"x86_64": 202, "aarch64": 98}  # number of the system call
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_POLL_S = 1e-3  # where there is no futex
_counting = threading.Lock()
_Limit = ctypes.c_long * 2  # a timespec


@cache
def _futex() -> tuple[Callable[[int, int, float], None], Callable[[int], None]] | None:
    """(sleep while the low half of the word at an address is a value, for some seconds at most; wake those that do)."""
    number = _FUTEX.get(platform.machine())
    if number is None or sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    sleeping, quick = ctypes.CDLL(None, use_errno=True).syscall, ctypes.PyDLL(None).syscall
    for call, last in ((sleeping, ctypes.POINTER(_Limit)), (quick, ctypes.c_void_p)):
        call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, last]
        call.restype = ctypes.c_long

    def wait(address: int, seen: int, timeout_s: float) -> None:
        limit = _Limit(int(timeout_s), int(timeout_s % 1 * 1e9))
        failed = sleeping(number, address, _FUTEX_WAIT, seen & _LOW, ctypes.byref(limit))
        if failed and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):  # a host that forbids it
            time.sleep(min(_POLL_S, timeout_s))

    return wait, lambda address: quick(number, address, _FUTEX_WAKE, _ALL_WAITERS, None)


class Words:
    """`count` signed 64-bit words from `address` on; usable from any thread and process.

    `address` is 8-byte aligned and mapped for as long as `keepalive` lives, which this object and its tensors hold.
    """

    __slots__ = ("_address", "_atomics", "_count", "_keepalive")

    def __init__(self, address: int, count: int, keepalive: object, atomics: Atomics | None = None) -> None:
        if address % 8 or address <= 0:
            raise ValueError(f"words need an 8-byte aligned address, not {address:#x}")
        if count < 0:
            raise ValueError(f"a number of words cannot be negative: {count}")
        self._address, self._count, self._keepalive = address, count, keepalive
        self._atomics = atomics or default_atomics()

    def __len__(self) -> int:
        return self._count

    def _at(self, i: int) -> int:
        if not 0 <= i < self._count:
            raise IndexError(f"word {int(i)} of {self._count}")
        return self._address + 8 * i

    def load(self, i: int) -> int:
        """Word `i`; acquires: what its writer wrote before storing it is visible afterwards."""
        return self._atomics.load(self._at(i))

    def store(self, i: int, value: int) -> None:
        """Set word `i`; releases: what this thread wrote before is visible to any thread that loads the new value."""
        self._atomics.store(self._at(i), _fits(value))

    def loading(self, i: int) -> Callable[[], int]:
        """`load` of word `i`, for frequent calls: the index is checked once, here."""
        if type(self).load is not Words.load:  # a subclass sees every load
            return functools.partial(self.load, i)
        return self._bound(self._atomics.load, i)

    def storing(self, i: int) -> Callable[[int], None]:
        """`store` of word `i`, for frequent calls: the index is checked once, here, and whether a value fits is not."""
        if type(self).store is not Words.store:  # a subclass sees every store
            return functools.partial(self.store, i)
        return self._bound(self._atomics.store, i)

    def _bound(self, operation: Callable[..., Any], i: int) -> Callable[..., Any]:
        bound = functools.partial(operation, self._at(i))
        bound.keepalive = self._keepalive  # type: ignore[attr-defined]  # the memory stays mapped while it can be called
        return bound

    def wake(self, i: int) -> None:
        """Wake every thread, of any process, that is in `wait_at_least` of word `i`. Does not wait."""
        if (futex := _futex()) is not None:
            futex[1](self._at(i))

    def wait_at_least(self, i: int, value: int, timeout_s: float) -> None:
        """Sleep while word `i` is below `value`, until a thread calls `wake`, for `timeout_s` at most, or less."""
        seen = self.load(i)
        if seen >= value:
            return
        if (futex := _futex()) is not None:
            futex[0](self._at(i), seen, timeout_s)
        else:
            time.sleep(min(_POLL_S, timeout_s))

    def fence(self) -> None:
        """Order every access of this thread before it, to words or bulk memory, before every access after it."""
        self._atomics.fence()

    def add(self, i: int, delta: int) -> int:
        """Add to word `i` atomically, wrapping around at 64 bits, and return its previous value.

        Raises UnsupportedError where this machine lacks libatomic.
        """
        return self._atomics.add(self._at(i), _fits(delta))

    def count(self, i: int, delta: int) -> None:
        """Add to word `i`, which only threads of this process store; on every machine."""
        with _counting:
            self.store(i, self.load(i) + delta)

    def as_bytes(self, offset: int, nbytes: int) -> memoryview:
        """Some of their bytes, from `offset` on. As with `as_tensor` nothing is ordered; torch has no part in it."""
        if not 0 <= offset <= offset + nbytes <= 8 * self._count:
            raise IndexError(f"bytes {offset} to {offset + nbytes} of {self._count} words")
        buffer = (ctypes.c_ubyte * nbytes).from_address(self._address + offset)
        buffer.keepalive = self._keepalive  # type: ignore[attr-defined]  # the view holds the buffer
        return memoryview(buffer).cast("B")

    def as_tensor(self) -> torch.Tensor:
        """int64 [count] view for bulk reads and writes. These order nothing: load or store a word around them."""
        if not self._count:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        buffer = (ctypes.c_int64 * self._count).from_address(self._address)
        buffer.keepalive = self._keepalive  # type: ignore[attr-defined]  # the tensor holds the buffer
        return torch.frombuffer(buffer, dtype=torch.int64)


def _fits(value: int) -> int:
    if not -_TOP <= value < _TOP:
        raise OverflowError(f"{value} does not fit into a signed 64-bit word")
    return value
