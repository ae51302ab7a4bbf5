"""Shared file memory mapped into this process, and the advice odc gives the kernel about pages.

mmap(2) is called through ctypes because Python's `mmap` object lacks three things: here memory is unmapped when its
last view dies, no second descriptor is held, and a forked child lets go of the mapping. In the child, private zeros
replace it: the child keeps no rank's memory alive, cannot harm the peers of its parent, and does not crash if a
destructor touches a view. (MADV_DONTFORK would leave a hole that a late munmap could tear into something else.)
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

from odc.memory.processes import close_after_fork

_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_HUGE_FROM_BYTES = 4 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGEST_KEPT = -1, -3, 32 << 20
_kept = 0  # bytes that malloc keeps
_STEP = 256 << 20  # bytes prefaulted between two looks at the memory that is left
_RETRIES = 100


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


class _MappedRange:
    """The mapped addresses; unmapped once, by the finalizer of the buffer over them."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._address, self._nbytes, self._mapped = address, nbytes, True

    def unmap(self) -> None:
        self._mapped = False
        _libc().munmap(self._address, self._nbytes)

    def close(self) -> None:
        """In a forked child: replace the mapping by private zeros, which hold no memory until they are written."""
        if self._mapped:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
            try:
                _mmap(self._address, self._nbytes, flags, -1)
            except OSError:  # a host that never overcommits accounts for writable memory, so map it read-only
                _mmap(self._address, self._nbytes, flags, -1, mmap.PROT_READ)


class Mapping:
    """The first `nbytes` of `fd`, readable and, by default, writable. `fd` may be closed afterwards.

    Unmapped when this object and every tensor made from it are gone. Raises OSError if the kernel refuses.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool = True) -> None:
        protection = _READ_WRITE if writable else mmap.PROT_READ
        self.address, self.nbytes = _mmap(None, nbytes, mmap.MAP_SHARED, fd, protection), nbytes
        # Every tensor holds the buffer, which need not hold this object.
        self._buffer = (ctypes.c_char * nbytes).from_address(self.address)
        held = _MappedRange(self.address, nbytes)
        # Not at interpreter exit: daemonic threads may still use a view then, and the kernel unmaps anyway.
        weakref.finalize(self._buffer, held.unmap).atexit = False
        close_after_fork(held)

    def tensor(self, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """1-D view of `numel` elements from byte `offset` on; it keeps the mapping alive."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._buffer, dtype=dtype, count=numel, offset=offset)

    def prefault(self, before_step: Callable[[int], None] = lambda left: None, *, fresh: bool) -> None:
        """Make every page present and mapped, so that no first touch happens later. Raises OSError where that fails.

        `before_step`, which may raise, is called every 256 MiB with the number of bytes still to come. `fresh`: no
        other process uses the memory yet, so it may be written where the kernel cannot populate it.
        """
        for start in range(0, self.nbytes, _STEP):
            before_step(self.nbytes - start)
            size = min(_STEP, self.nbytes - start)
            # Populating by reading maps pages that exist already faster, and leaves them writable.
            code = _populate(self.address + start, size, _MADV_POPULATE_WRITE if fresh else _MADV_POPULATE_READ)
            if code == errno.EINVAL:
                self._touch(start, size, fresh)
            elif code:
                raise _os_error(code, f"cannot make {size} bytes present")

    def _touch(self, start: int, size: int, fresh: bool) -> None:
        """Access each page once, for kernels that cannot populate."""
        pages = self.tensor(torch.uint8, start, size)[:: mmap.PAGESIZE]
        if fresh:
            pages.zero_()
        else:
            pages.max()


def _populate(address: int, nbytes: int, advice: int) -> int:
    """Have the kernel fault the pages in; returns 0 or an errno."""
    for _ in range(_RETRIES):
        if not _libc().madvise(address, nbytes, advice):
            return 0
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR):
            return code
    return code


def advise_huge(buffer: torch.Tensor) -> None:
    """Ask for huge pages under `buffer` (contiguous, on the CPU) if it is large; best effort, never raises.

    Where transparent huge pages are given on request ("madvise", the usual default) this saves most of the page faults
    of filling fresh memory.
    """
    if buffer.nbytes >= _HUGE_FROM_BYTES:
        start = -(-buffer.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = (buffer.data_ptr() + buffer.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        _libc().madvise(start, nbytes, _MADV_HUGEPAGE)


def keep_freed(nbytes: int) -> None:
    """Have malloc keep at least `nbytes` that were freed, in this process, for what is allocated next. Best effort.

    Unsharded parameters and gradients come and go in every unit; else the kernel takes their pages back and zeroes new
    ones each time. Blocks of 32 MiB and more, the largest that glibc keeps, are still given back.
    """
    global _kept
    libc = _libc()
    if nbytes > _kept and hasattr(libc, "mallopt"):
        _kept = nbytes
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)  # where glibc goes by itself, step by step; else it stops there
        libc.mallopt(_M_TRIM_THRESHOLD, min(max(nbytes, 2 * _LARGEST_KEPT), (1 << 31) - 1))
