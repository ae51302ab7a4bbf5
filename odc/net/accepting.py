"""Accepting connections on a listening socket without spinning when this process is out of file descriptors.

A connection that cannot be accepted stays in the backlog and keeps the socket readable, so a loop that sleeps in epoll
until the socket is readable would be woken without end.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
from collections.abc import Iterator

_OUT_OF_DESCRIPTORS = {
    errno.EMFILE: "raise this process's limit of open files (ulimit -n)",
    errno.ENFILE: "raise this machine's limit of open files (sysctl fs.file-max)",
}

_log = logging.getLogger(__name__)


def remedy(error: OSError, otherwise: str) -> str:
    """What to do about an error of opening or listening: where descriptors have run out, something else than
    `otherwise`.
    """
    return _OUT_OF_DESCRIPTORS.get(error.errno or 0, otherwise)


class Acceptor:
    """Accepts from `listening`, a non-blocking socket, which it registers with `epoll`; `name` is for the log.

    It holds a spare descriptor, which it gives up to hang up on one client when there is no other left. If another
    thread takes that too, epoll reports the socket again only when the next client connects.
    """

    def __init__(self, listening: socket.socket, epoll: select.epoll, name: str) -> None:
        self._listening, self._epoll, self._name = listening, epoll, name
        self._spare = os.open(os.devnull, os.O_RDONLY)
        self._stuck = False
        epoll.register(listening, select.EPOLLIN)

    def accept(self, most: int) -> Iterator[socket.socket]:
        """At most `most` connections that wait; the caller owns each. Never raises, and waits for none."""
        for _ in range(most):
            try:
                accepted, _ = self._listening.accept()
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    self._refuse_one()
                return
            self._wake_for_waiting(True)
            yield accepted

    def _refuse_one(self) -> None:
        _log.warning("listener %s: out of file descriptors (ulimit -n), a connection was refused", self._name)
        self.close()
        try:
            self._listening.accept()[0].close()
            self._wake_for_waiting(True)
        except OSError:  # another thread was quicker, or the whole machine has no descriptor left
            self._wake_for_waiting(False)
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def _wake_for_waiting(self, wanted: bool) -> None:
        """Whether epoll reports the socket for as long as a client waits, or only as each one connects."""
        if self._stuck == wanted:
            self._stuck = not wanted
            self._epoll.modify(self._listening, select.EPOLLIN | (0 if wanted else select.EPOLLET))

    def close(self) -> None:
        """Give the spare descriptor back; idempotent."""
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)
