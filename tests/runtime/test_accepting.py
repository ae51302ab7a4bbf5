"""Twin of odc/net/accepting.py: both listeners of a daemon, while this process is out of file descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from odc.net.listener import Listener
from odc.net.reception import Reception

CLIENTS = 5
_SOME_TURNS = 10 * CLIENTS  # a loop that spins takes as many as it is given


def unix() -> tuple[Any, Callable[[], socket.socket]]:
    name = f"odc-test.{uuid.uuid4().hex[:12]}"

    def connect() -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.connect("\0" + name)
        return client

    return Listener(name, lambda request, peer: ({}, ())), connect


def tcp() -> tuple[Any, Callable[[], socket.socket]]:
    reception = Reception("127.0.0.1", b"s" * 32, 0, lambda purpose, rank, connection: connection.close())
    return reception, lambda: socket.create_connection(("127.0.0.1", reception.port), 60)


@contextlib.contextmanager
def no_descriptor_left(*, though_one_is_closed: bool) -> Iterator[None]:
    """No new descriptor can be opened in this process; with `though_one_is_closed` not even in another one's place."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    full: list[int] = []
    try:
        highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3 if though_one_is_closed else highest + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                full.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in full:
            os.close(fd)


def turns_until_quiet(listener: Any) -> int:
    """How often the daemon's loop is woken for this listener before it may sleep; `_SOME_TURNS` if it never may."""
    for turn in range(_SOME_TURNS):
        if not select.select([listener.fileno()], [], [], 0)[0]:
            return turn
        listener.answer()
    return _SOME_TURNS


@pytest.mark.parametrize("make", [unix, tcp])
@pytest.mark.parametrize("though_one_is_closed", [False, True], ids=["spare", "no spare"])
def test_a_loop_sleeps_though_clients_cannot_be_accepted(
    make: Callable[[], tuple[Any, Callable[[], socket.socket]]], though_one_is_closed: bool, caplog: Any
) -> None:
    listener, connect = make()
    with contextlib.closing(listener), contextlib.ExitStack() as clients:
        waiting = [clients.enter_context(connect()) for _ in range(CLIENTS)]
        later = [clients.enter_context(socket.socket(one.family)) for one in waiting]
        where = waiting[0].getpeername()
        with no_descriptor_left(though_one_is_closed=though_one_is_closed):
            first = turns_until_quiet(listener)
            for one in later:
                one.connect(where)
            second = turns_until_quiet(listener)
        assert first <= CLIENTS + 2 and second <= CLIENTS + 2, (first, second)
        assert "out of file descriptors (ulimit -n)" in caplog.text
        if not though_one_is_closed:
            assert [one.recv(1) for one in (*waiting, *later)] == [b""] * (2 * CLIENTS), "not all were hung up on"
        with connect() as client:  # it is accepted, and whoever has waited since then
            while turns_until_quiet(listener):
                pass
            client.settimeout(60)
            client.sendall(b"\xff" * 200)  # no protocol of odc: hung up on
            assert select.select([listener.fileno()], [], [], 60)[0]
            listener.answer()
            with contextlib.suppress(ConnectionResetError):
                while client.recv(1 << 10):
                    pass
