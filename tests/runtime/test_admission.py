"""Twin of odc/net/admission.py."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from odc.errors import ConfigError
from odc.net.admission import READER, AdmissionError, Visitor, admit, job_secret, secret_for
from odc.net.store import JobStore

SECRET = b"s" * 32
HELLO, MAC = 108, 32


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def beside(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run `work` on a thread; the result gives what it returned or the error it raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(30)
        return found[0]

    return result


def test_both_ends_learn_who_the_other_is_and_nothing_behind_the_handshake_is_lost(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    server = beside(lambda: admit(ends[1], "server", SECRET, 7, purpose="words"))
    assert admit(ends[0], "client", SECRET, 3, purpose="words") == 7
    ends[0].sendall(b"first")
    assert server() == 3
    assert ends[1].recv(5) == b"first"
    assert ends[0].gettimeout() is None


@pytest.mark.parametrize(("secret", "purpose"), [(b"x" * 32, "words"), (SECRET, "read")])
def test_a_visitor_with_another_secret_or_purpose_gets_no_proof(
    ends: tuple[socket.socket, socket.socket], secret: bytes, purpose: str
) -> None:
    def serve() -> int:
        try:
            return admit(ends[1], "server", SECRET, 7, purpose="words")
        finally:
            ends[1].close()

    server = beside(serve)
    with pytest.raises(AdmissionError, match="hung up"):
        admit(ends[0], "client", secret, 3, purpose=purpose)
    assert isinstance(server(), AdmissionError)


@pytest.mark.parametrize(
    ("secret", "purpose", "admitted"),
    [
        (secret_for(SECRET, "export 0.a"), "export 0.a", True),
        (secret_for(SECRET, "export 0.a"), "export 1.a", False),
        (secret_for(SECRET, "export 0.a"), "words", False),
        (SECRET, "export 0.a", False),
    ],
)
def test_a_readers_secret_opens_one_export(
    ends: tuple[socket.socket, socket.socket], secret: bytes, purpose: str, admitted: bool
) -> None:
    def serve() -> int:
        try:
            return admit(ends[1], "server", SECRET, 7, purpose=purpose, timeout_s=60.0)
        except AdmissionError:
            ends[1].close()
            raise

    server = beside(serve)
    if admitted:
        assert admit(ends[0], "client", secret, READER, purpose=purpose, timeout_s=60.0) == 7
        assert server() == READER
    else:
        with pytest.raises(AdmissionError, match="hung up"):
            admit(ends[0], "client", secret, READER, purpose=purpose, timeout_s=60.0)
        assert isinstance(server(), AdmissionError)


def test_a_listener_without_the_secret_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    def pretend() -> None:
        hello = ends[1].recv(HELLO)
        ends[1].sendall(hello)  # its own words back, and then its own proof
        ends[1].sendall(ends[1].recv(MAC))

    pretender = beside(pretend)
    with pytest.raises(AdmissionError, match="does not know"):
        admit(ends[0], "client", SECRET, 3)
    pretender()


def test_a_silent_visitor_is_given_up(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        admit(ends[1], "server", SECRET, 7, timeout_s=0.02)


def test_a_visitor_that_says_the_wrong_things_learns_only_a_nonce() -> None:
    for said in (b"GET / HTTP/1.1\r\n" * 8)[:HELLO], os.urandom(HELLO), bytes(HELLO):
        with pytest.raises(AdmissionError, match="protocol"):
            Visitor(SECRET, 7).feed(said)
    visitor = Visitor(SECRET, 7)
    assert visitor.feed(b"odc-hst1" + bytes(50)) == b""
    assert len(visitor.feed(bytes(50))) == HELLO
    with pytest.raises(AdmissionError, match="too much"):
        visitor.feed(bytes(MAC + 1))
    with pytest.raises(AdmissionError, match="secret"):
        visitor.feed(bytes(MAC))


def test_the_secret_is_one_for_a_job_and_another_for_the_next(tmp_path: Path) -> None:
    stores = [JobStore(dist.HashStore(), 60.0) for _ in range(2)]
    first = job_secret(stores[0])
    assert first == job_secret(stores[0]) != job_secret(stores[1])
    file = tmp_path / "secret"
    with pytest.raises(ConfigError, match="cannot be read"):
        job_secret(stores[0], str(file))
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        job_secret(stores[0], str(file))
    file.write_text("one")
    guarded = job_secret(stores[0], str(file))
    assert guarded == job_secret(stores[0], str(file)) != first
    assert guarded != job_secret(stores[1], str(file)), "two jobs with one file must not mix"
