"""Listeners of both families: a loop to drive them, clients that keep to the protocol and clients that do not."""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest import mock

from odc.deadlines import CONVERSATION_S, Deadline
from odc.net.conversation import converse
from odc.net.handshake import Admitted, PeerCredentials, answer_handshake, begin_handshake
from odc.net.listener import Listener
from odc.net.reactor import Reactor, Registration
from odc.net.requests import ask, frame, serve_requests
from odc.net.tcp import bind
from odc.runtime.daemon import RankStatus, ask_all

SECRET = b"s" * 32
PATIENCE_S = 60.0


@contextlib.contextmanager
def reactor() -> Iterator[Reactor]:
    """A loop for the length of the block; an error that ends it fails the test."""
    failures: list[BaseException] = []
    made = Reactor("test loop", failures.append)
    try:
        yield made
    finally:
        made.stop(PATIENCE_S)
    assert not failures, failures


class ByHand:
    """The part of a reactor that a listener needs, turned by the test: nothing depends on the time that passes."""

    def __init__(self) -> None:
        self._registered: dict[tuple[int, bool], Registration] = {}
        self._timers: list[Callable[[], object]] = []

    def on_readable(self, fd: int, call: Callable[[], object]) -> Registration:
        return self._register((fd, False), call)

    def on_writable(self, fd: int, call: Callable[[], object]) -> Registration:
        return self._register((fd, True), call)

    def _register(self, key: tuple[int, bool], call: Callable[[], object]) -> Registration:
        made = self._registered[key] = Registration(call, lambda: self._registered.pop(key))
        return made

    def call(self, task: Callable[[], object], *, after_s: float = 0.0) -> None:
        self._timers.append(task) if after_s else task()

    def turn(self) -> bool:
        """Make the calls of one round; whether there were any."""
        fds = [[fd for fd, writes in self._registered if writes == sends] for sends in (False, True)]
        readable, writable, _ = select.select(*fds, [], 0)
        for key in [(fd, False) for fd in readable] + [(fd, True) for fd in writable]:
            if key in self._registered:
                self._registered[key]()
        return bool(readable or writable)

    def run_timers(self) -> None:
        timers, self._timers = self._timers, []
        for task in timers:
            task()


def echo(request: dict[str, Any], peer: PeerCredentials) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Answers with the request, and the process that sent it."""
    return {"asked": request, "pid": peer.pid, "uid": peer.uid}, ()


@contextlib.contextmanager
def served(name: str, handler: Callable[..., Any] = echo) -> Iterator[Listener[None]]:
    """A Unix listener that answers requests, for the length of the block."""
    with reactor() as loop:
        listener = serve_requests(loop, name, handler, PATIENCE_S)
        try:
            yield listener
        finally:
            loop.call(listener.close)


@contextlib.contextmanager
def asked_alone(pids: Collection[int]) -> Iterator[None]:
    """Ranks of other jobs on this host, which may be stopped, are asked for no status."""
    module, numbers = sys.modules["odc.runtime.daemon"], set(map(str, pids))
    found = module.list_listeners
    with mock.patch.object(module, "list_listeners", lambda *of: [a for a in found(*of) if numbers & {*a.split(".")}]):
        yield


def status_of(pids: Collection[int]) -> list[RankStatus]:
    """What `ask_all` finds of these processes, however busy they are."""
    with asked_alone(pids):
        return [answer for answer in ask_all(PATIENCE_S) if answer.pid in pids]


def raw(name: str) -> socket.socket:
    """A connection to a Unix listener, for clients that do not keep to the protocol."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(PATIENCE_S)
    connection.connect("\0" + name)
    return connection


class Family(ABC):
    """One of the two families of listeners, with clients."""

    first: bytes  # what a client that keeps to the protocol sends first

    @abstractmethod
    def listen(self, loop: Any, limit_s: float = CONVERSATION_S) -> Listener[Any]: ...

    @abstractmethod
    def connect(self) -> socket.socket: ...

    @abstractmethod
    def succeed(self) -> bool:
        """Whether a client that keeps to the protocol is served."""


class Unix(Family):
    first = frame({"a": 1})

    def __init__(self) -> None:
        self.name = f"odc-test.{uuid.uuid4().hex[:12]}"

    def listen(self, loop: Any, limit_s: float = CONVERSATION_S) -> Listener[Any]:
        return serve_requests(loop, self.name, echo, limit_s)

    def connect(self) -> socket.socket:
        return raw(self.name)

    def succeed(self) -> bool:
        return ask(self.name, {"a": 1}, PATIENCE_S).reply["asked"] == {"a": 1}


class Tcp(Family):
    first = next(begin_handshake(SECRET, 3, "link 0.a")).data

    def __init__(self) -> None:
        self.admitted: list[Admitted] = []
        self._address = "", 0

    def listen(self, loop: Any, limit_s: float = CONVERSATION_S) -> Listener[Any]:
        listening = bind("127.0.0.1")
        self._address = listening.getsockname()
        return Listener(loop, listening, "tcp", lambda one: answer_handshake(SECRET, 7), self._welcome, limit_s)

    def _welcome(self, connection: socket.socket, admitted: Admitted) -> None:
        self.admitted.append(admitted)
        with connection:
            connection.sendall(b"welcome")

    def connect(self) -> socket.socket:
        return socket.create_connection(self._address, PATIENCE_S)

    def succeed(self, secret: bytes = SECRET) -> bool:
        with self.connect() as connection:
            rank = converse(connection, begin_handshake(secret, 3, "link 0.a"), Deadline(PATIENCE_S))
            return (rank, connection.recv(7)) == (7, b"welcome")
