"""The end of an engine that answers, while another thread gives it a connection."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from odc.net.engines import server as module
from odc.net.engines.server import RegionServer
from odc.net.engines.staging import Stages


def connected(listening: socket.socket) -> tuple[socket.socket, socket.socket]:
    ours = socket.create_connection(listening.getsockname())
    theirs, _ = listening.accept()
    return ours, theirs


def hangs_up(connection: socket.socket) -> bool:
    connection.settimeout(60.0)
    return connection.recv(1) == b""


@pytest.mark.parametrize("before", [0, 1])
def test_a_connection_that_comes_as_the_server_closes_is_ended(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon adopts it, whose loop an error would end, and the rank's main thread closes."""
    server = RegionServer(30.0, None, Stages())
    closing = threading.Thread(target=server.close, daemon=True)
    made: Any = module._Conversation

    def meanwhile(*arguments: Any) -> Any:
        closing.start()
        closing.join(0.3)
        return made(*arguments)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        pairs = [connected(listening) for _ in range(before + 1)]
        for _, theirs in pairs[:-1]:
            server.adopt(theirs, 1)
        monkeypatch.setattr(module, "_Conversation", meanwhile)
        server.adopt(pairs[-1][1], 1)
        closing.join(60.0)
        assert not closing.is_alive()
        for ours, _ in pairs:
            with ours:
                assert hangs_up(ours)
    assert server._wake < 0
    assert server._epoll is None or server._epoll.closed


def test_a_server_without_a_thread_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    server = RegionServer(30.0, None, Stages())

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours, theirs = connected(listening)
        with ours, theirs, monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                server.adopt(theirs, 1)
    server.close()
    assert server._epoll is not None
    assert server._epoll.closed
