"""Is another process of this host still alive?

Chose a pidfd: it names the process and not the number, so a reused pid cannot look alive, and it can be waited for with
epoll next to everything else. (A file lock is inherited by forked data loader workers and hid a death for 6 s,
measured.) Where the kernel refuses pidfds, the start time in /proc/<pid>/stat tells reuse apart; that has to be polled.
"""

from __future__ import annotations

import errno
import os
import select
from pathlib import Path

from odc.memory.forks import close_after_fork

_REFUSED = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENODEV})


class ProcessHandle:
    """Watches one process, which need not be a child. May be used from any thread; close it.

    Args:
        pid: of the process, as seen from here. A process that is gone already gives a handle that is not alive.
        proc: where procfs is mounted.
    """

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        if pid <= 0:
            raise ValueError(f"{pid} is no process id; a peer in another PID namespace cannot be watched")
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
        """A descriptor that becomes readable when the process ends; None where there is none and one has to poll."""
        return self._fd

    def alive(self) -> bool:
        """False once the process has ended, even while it is a zombie. Never blocks."""
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
        """Give the descriptor back; the process counts as gone afterwards. Idempotent."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)
        self._start = None
