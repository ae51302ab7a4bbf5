"""Twin of odc/net/reception.py."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from odc.net import reception as module
from odc.net.admission import AdmissionError, admit
from odc.net.reception import Reception

SECRET = b"s" * 32


class Host:
    """A reception that a thread drives, as the daemon does."""

    def __init__(self) -> None:
        self.admitted: list[tuple[str, int, bytes]] = []
        self.reception = Reception("127.0.0.1", SECRET, 7, self._welcome)
        self.address = "127.0.0.1", self.reception.port
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            self.reception.answer()
            time.sleep(0.001)

    def _welcome(self, purpose: str, rank: int, connection: socket.socket) -> None:
        with connection:
            connection.sendall(b"welcome")
            self.admitted.append((purpose, rank, connection.recv(5)))

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        self.reception.close()


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


def visit(host: Host, secret: bytes = SECRET) -> bytes:
    with socket.create_connection(host.address, 30) as connection:
        assert admit(connection, "client", secret, 3, purpose="link 0.a", timeout_s=30) == 7
        connection.sendall(b"hello")
        said = connection.recv(7)
        assert connection.recv(1) == b"", "the end comes once it is noted"
        return said


def until_closed(connection: socket.socket) -> int:
    """Bytes that came before the end."""
    connection.settimeout(30)
    count = 0
    try:
        while data := connection.recv(4096):
            count += len(data)
    except ConnectionResetError:
        pass
    return count


def test_who_knows_the_secret_is_welcome(host: Host) -> None:
    assert visit(host) == b"welcome"
    assert host.admitted == [("link 0.a", 3, b"hello")]
    assert not host.reception.busy


def test_who_does_not_gets_a_nonce_and_stops_nobody(host: Host) -> None:
    noise = [socket.create_connection(host.address, 30) for _ in range(20)]
    for number, connection in enumerate(noise):
        connection.sendall(b"GET / HTTP/1.1\r\n" * 20 if number % 2 else b"odc-hst1" + os.urandom(400))
    with pytest.raises(AdmissionError):
        visit(host, b"x" * 32)
    assert visit(host) == b"welcome"
    told = [until_closed(connection) for connection in noise]
    assert max(told) <= 108, "more than a nonce was said to a visitor without the secret"
    for connection in noise:
        connection.close()
    assert len(host.admitted) == 1


def test_more_silent_visitors_than_there_is_room_for(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = [socket.create_connection(host.address, 30) for _ in range(module._MAX_VISITORS + 10)]
    assert visit(host) == b"welcome"
    assert len(host.reception._guests) <= module._MAX_VISITORS
    assert until_closed(silent[0]) == 0, "the oldest was not given up"
    for connection in silent:
        connection.close()


def test_a_silent_visitor_is_given_up(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ADMISSION_S", 0.05)
    with socket.create_connection(host.address, 30) as connection:
        assert until_closed(connection) == 0
    assert not host.reception.busy
