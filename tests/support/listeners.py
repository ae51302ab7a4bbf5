"""A listener that a thread answers at, as the daemon does."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from odc.net.listener import Listener, PeerCredentials


def echo(request: dict[str, Any], peer: PeerCredentials) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Answers with what was asked, and by whom."""
    return {"asked": request, "pid": peer.pid, "uid": peer.uid}, ()


@contextmanager
def served(name: str, handler: Callable[..., Any] = echo, connection_s: float = 1.0) -> Iterator[Listener]:
    """Open for the length of the block; what `answer` raises fails the test."""
    listener = Listener(name, handler, connection_s)
    stop, wake = os.pipe()
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            while stop not in select.select([listener.fileno(), stop], [], [])[0]:
                listener.answer()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener
    finally:
        os.write(wake, b".")  # not close: a forked child may hold a copy
        thread.join()
        os.close(wake)
        os.close(stop)
        listener.close()
    assert not failures, failures


def raw(name: str) -> socket.socket:
    """A connection to a listener, for clients that do not follow the protocol."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(20)
    connection.connect("\0" + name)
    return connection
