"""A piece of a file mapped into this process, shared with whoever else maps it.

Chose mmap(2) through ctypes over Python's `mmap` object, for three things the latter cannot do: it is unmapped when the
last view dies and not before (no BufferError at close), it holds no second descriptor, and a forked child lets go of
it. In such a child private zeros take the mapping's place: the child keeps no rank's memory alive, can do its parent's
peers no harm, and does not crash if a destructor touches a view. (MADV_DONTFORK would leave a hole there, into which
the child may map something else that a late munmap would then destroy.)
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable
from functools import cache

import torch

from odc.memory.forks import close_after_fork

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_STEP = 256 << 20  # bytes prefaulted between two looks at the memory that is left
_AGAIN = 100


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    return libc


def _mmap(where: int | None, nbytes: int, flags: int, fd: int, protection: int = _READ_WRITE) -> int:
    address = _libc().mmap(where, nbytes, protection, flags, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise _os_error(ctypes.get_errno(), f"cannot map {nbytes} bytes")
    return int(address)


def _os_error(code: int, what: str) -> OSError:
    return OSError(code, f"{what}: {os.strerror(code)}")


class _Range:
    """The mapped addresses; unmapped once, by the finalizer of the buffer over them."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._address, self._nbytes, self._mapped = address, nbytes, True

    def unmap(self) -> None:
        self._mapped = False
        _libc().munmap(self._address, self._nbytes)

    def close(self) -> None:
        """In a forked child: put private zeros over it; they hold no memory until they are written."""
        if self._mapped:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
            try:
                _mmap(self._address, self._nbytes, flags, -1)
            except OSError:  # a host that never overcommits counts what could be written: then it cannot be
                _mmap(self._address, self._nbytes, flags, -1, mmap.PROT_READ)


class Mapping:
    """The first `nbytes` of `fd`, readable and, unless told otherwise, writable; `fd` may be closed afterwards.

    It is unmapped when this object and every tensor made of it are gone. `address` is in this process.

    Raises:
        OSError: the kernel refuses.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool = True) -> None:
        protection = _READ_WRITE if writable else mmap.PROT_READ
        self.address, self.nbytes = _mmap(None, nbytes, mmap.MAP_SHARED, fd, protection), nbytes
        # Every tensor holds the buffer, which need not hold this object.
        self._buffer = (ctypes.c_char * nbytes).from_address(self.address)
        held = _Range(self.address, nbytes)
        # Not at interpreter exit: daemonic threads may still use a view then, and the kernel unmaps anyway.
        weakref.finalize(self._buffer, held.unmap).atexit = False
        close_after_fork(held)

    def tensor(self, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """1-D view of `numel` elements from byte `offset` on; it keeps the mapping alive."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._buffer, dtype=dtype, count=numel, offset=offset)

    def prefault(self, before_step: Callable[[int], None] = lambda left: None, *, fresh: bool) -> None:
        """Have every page present and mapped, so that no first touch happens later.

        Args:
            before_step: called every 256 MiB with the bytes still to come; may raise.
            fresh: the memory is new and nobody else uses it yet: it may be written where the kernel cannot populate.

        Raises:
            OSError: the pages cannot be had.
        """
        for start in range(0, self.nbytes, _STEP):
            before_step(self.nbytes - start)
            size = min(_STEP, self.nbytes - start)
            # Reading maps pages that exist already twice as fast, and writable all the same (measured).
            code = _populate(self.address + start, size, _MADV_POPULATE_WRITE if fresh else _MADV_POPULATE_READ)
            if code == errno.EINVAL:
                self._touch(start, size, fresh)
            elif code:
                raise _os_error(code, f"cannot have {size} bytes present")

    def _touch(self, start: int, size: int, fresh: bool) -> None:
        """For kernels that cannot populate: one access a page."""
        pages = self.tensor(torch.uint8, start, size)[:: mmap.PAGESIZE]
        if fresh:
            pages.zero_()
        else:
            pages.max()


def _populate(address: int, nbytes: int, advice: int) -> int:
    """Have the kernel fault the pages in; returns 0 or an errno."""
    for _ in range(_AGAIN):
        if not _libc().madvise(address, nbytes, advice):
            return 0
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR):
            return code
    return code
