"""Other processes of this host: whether one is still alive, and what a forked child must release.

A pidfd names a process rather than its number, so a recycled pid cannot look alive, and epoll can wait for it. Where
the kernel refuses pidfds, the start time in /proc/<pid>/stat distinguishes a recycled pid, but has to be polled.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import weakref
from pathlib import Path
from typing import Protocol

_REFUSED = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENODEV})


class Closes(Protocol):
    """Anything with a `close()` that affects only this process: it unlinks, sends and writes nothing that is shared."""

    def close(self) -> None: ...


_held: weakref.WeakSet[Closes] = weakref.WeakSet()
_registered = False


def close_after_fork(resource: Closes) -> None:
    """Call `resource.close()` in every child that this process forks from now on, for as long as `resource` lives.

    A data loader worker forked from a rank would otherwise keep the rank's sockets and memory alive after its death.
    """
    global _registered
    _held.add(resource)
    if not _registered:  # one handler for the whole process: a registration can never be undone
        _registered = True
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for resource in list(_held):
        with contextlib.suppress(Exception):  # the remaining ones must still be closed
            resource.close()
    _held.clear()


class ProcessHandle:
    """Watches one process, which need not be a child and may have ended. May be used from any thread."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        if pid <= 0:
            raise ValueError(f"{pid} is not a process id; a peer in another PID namespace cannot be watched")
        self.pid, self._stat = pid, proc / str(pid) / "stat"
        self._fd: int | None = None
        self._start: str | None = None
        try:
            self._fd = os.pidfd_open(pid)
            close_after_fork(self)
        except ProcessLookupError:
            pass
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._start = self._start_time()

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when the process ends; None where the process has to be polled."""
        return self._fd

    def alive(self) -> bool:
        """False once the process has ended, including while it is a zombie. Never blocks."""
        if self._fd is not None:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            return not poll.poll(0)
        return self._start is not None and self._start_time() == self._start

    def _start_time(self) -> str | None:
        """Start time in clock ticks since boot, or None if the process is gone or a zombie."""
        try:
            text = self._stat.read_text()
        except OSError:
            return None
        fields = text[text.rindex(")") + 2 :].split()  # the name in parentheses may hold anything
        return None if fields[0] in "ZX" else fields[19]

    def close(self) -> None:
        """Close the descriptor; the process counts as ended afterwards. Idempotent."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)
        self._start = None
