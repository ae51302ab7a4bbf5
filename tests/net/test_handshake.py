"""The handshake over TCP: both ends prove that they know the secret, and learn nothing from each other before."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.listeners import PATIENCE_S, SECRET, Tcp, reactor

from odc.deadlines import Deadline
from odc.errors import ConfigError
from odc.net.conversation import Conversation, HungUpError, converse
from odc.net.handshake import (
    READER,
    Admitted,
    HandshakeError,
    answer_handshake,
    begin_handshake,
    hello,
    job_secret,
    secret_for,
)
from odc.net.store import JobStore

EXPORT = "export 0.a"


def run(client: Conversation[int], server: Conversation[Admitted]) -> tuple[int, Admitted]:
    """Both sides of one handshake, without sockets."""
    asks, answers = next(client), next(server)
    assert not answers.data and len(asks.data) == answers.wanted == len(hello(0, ""))
    answers = server.send(asks.data)
    asks = client.send(answers.data)
    answers = server.send(asks.data)
    with pytest.raises(StopIteration) as admitted:
        server.send(b"")
    with pytest.raises(StopIteration) as found:
        client.send(answers.data)
    return found.value.value, admitted.value.value


def test_both_ends_learn_the_rank_at_the_other() -> None:
    sides = begin_handshake(SECRET, 3, "words"), answer_handshake(SECRET, 7)
    assert run(*sides) == (7, Admitted(3, "words"))


@pytest.mark.parametrize(
    ("secret", "purpose", "admitted"),
    [
        (secret_for(SECRET, EXPORT), EXPORT, True),
        (secret_for(SECRET, EXPORT), "export 1.a", False),
        (secret_for(SECRET, EXPORT), "words", False),
        (SECRET, EXPORT, False),
        (b"x" * 32, "words", False),
    ],
)
def test_a_secret_admits_for_its_purpose_only(secret: bytes, purpose: str, admitted: bool) -> None:
    sides = begin_handshake(secret, READER, purpose), answer_handshake(SECRET, 7)
    if admitted:
        assert run(*sides) == (7, Admitted(READER, purpose))
    else:
        with pytest.raises(HandshakeError, match="secret"):
            run(*sides)


def test_a_listener_without_the_secret_is_refused() -> None:
    """One that returns the client's own messages."""
    client = begin_handshake(SECRET, 3, "")
    mine = next(client)
    proof = client.send(mine.data)
    with pytest.raises(HandshakeError, match="does not know"):
        client.send(proof.data)


@pytest.mark.parametrize("message", [(b"GET / HTTP/1.1\r\n" * 8)[:108], bytes(108), os.urandom(108)])
def test_another_protocol_is_not_answered(message: bytes) -> None:
    server = answer_handshake(SECRET, 7)
    next(server)
    with pytest.raises(HandshakeError, match="protocol"):
        server.send(message)


def test_only_a_peer_with_the_secret_is_welcome() -> None:
    family = Tcp()
    with reactor() as loop:
        listener = family.listen(loop, PATIENCE_S)
        with pytest.raises(HungUpError):
            family.succeed(b"x" * 32)
        assert family.succeed()
        loop.call(listener.close)
    assert family.admitted == [Admitted(3, "link 0.a")]


def test_nothing_behind_the_handshake_is_lost_and_a_silent_listener_is_given_up() -> None:
    one, other = socket.socketpair()
    with one, other:
        found: list[Any] = []

        def serve() -> None:
            found.append(converse(other, answer_handshake(SECRET, 7), Deadline(PATIENCE_S)))

        server = threading.Thread(target=serve)
        server.start()
        assert converse(one, begin_handshake(SECRET, 3, "words"), Deadline(PATIENCE_S)) == 7
        one.sendall(b"first")
        server.join()
        assert found == [Admitted(3, "words")] and other.recv(5) == b"first"
        assert one.gettimeout() is None
        with pytest.raises(TimeoutError):
            converse(one, begin_handshake(SECRET, 3, "words"), Deadline(0.02))


def test_the_secret_is_one_for_a_job_and_another_for_the_next(tmp_path: Path) -> None:
    stores = [JobStore(dist.HashStore(), PATIENCE_S) for _ in range(2)]
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
