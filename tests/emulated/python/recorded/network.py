"""Messages between hosts, and the pinned memory that they go through."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from recorded.notes import ACQUIRE, MESSAGE, OBJECT, READ, RELEASE, WRITE, agreed, note, number, site, touched, wrapped


def _messages(kind: int, connection: socket.socket, *, sent: bool) -> None:
    """An order from all that was sent in one direction of a connection to what is received there."""
    with contextlib.suppress(OSError):
        ends = [str(connection.getsockname()), str(connection.getpeername())]
        text = ">".join(ends if sent else reversed(ends))
        note(kind, agreed(text), 0, MESSAGE, site())


def barriers(module: ModuleType) -> None:
    """Barriers of torch's, which tests call; odc calls none. Of its other collectives none orders anything here."""
    counts = Counter[str]()

    def barrier(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(group: Any = None, **named: Any) -> Any:
            where = module._get_default_group() if group is None else group
            port, ranks = os.environ.get("MASTER_PORT"), module.get_process_group_ranks(where)
            text = f"barrier of {ranks} of {where.group_name} at {port}"
            counts[text] += 1
            key = agreed(f"{text}: {counts[text]}")
            note(RELEASE, key, 0, MESSAGE)
            found = real(group, **named)
            note(ACQUIRE, key, 0, MESSAGE)
            return found

        return run

    wrapped(module, "barrier", barrier)
    if (public := sys.modules.get("torch.distributed")) is not None and hasattr(public, "barrier"):
        public.barrier = module.barrier


def descriptors(module: ModuleType) -> None:
    """Descriptors of memory that one process passes to another."""

    def numbers(fds: Iterable[int]) -> list[int]:
        return [agreed(f"descriptor of {os.fstat(fd).st_ino}") for fd in fds]

    def send(real: Callable[..., int]) -> Callable[..., int]:
        def run(sock: Any, buffers: Any, fds: Any, *rest: Any) -> int:
            for key in numbers(fds):
                note(RELEASE, key, 0, MESSAGE)
            return real(sock, buffers, fds, *rest)

        return run

    def receive(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            found = real(*args)
            for key in numbers(found[1]):
                note(ACQUIRE, key, 0, MESSAGE)
            return found

        return run

    wrapped(module, "send_fds", send)
    wrapped(module, "recv_fds", receive)


def host_link(module: ModuleType) -> None:
    """Words that are pushed to other hosts."""

    def send(real: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, *messages: Any) -> None:
            _messages(RELEASE, self._connection, sent=True)
            real(self, *messages)

        return run

    def receive(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any) -> Any:
            if found := real(self):
                _messages(ACQUIRE, self._connection, sent=False)
            return found

        return run

    wrapped(module.HostLink, "send", send)
    wrapped(module.HostLink, "receive", receive)


def questions(module: ModuleType) -> None:
    """ZeroMQ's, and their answers: of one asker and one who answers at an address."""
    asks, answers = module.zmq.REQ, module.zmq.REP
    other_end = {asks: answers, answers: asks}

    def key(one: Any, sender: int) -> int:
        return agreed(f"{one.getsockopt_string(module.zmq.LAST_ENDPOINT)}: {sender}")

    def send(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **named: Any) -> Any:
            note(RELEASE, key(self, self.type), 0, MESSAGE)
            return real(self, *args, **named)

        return run

    def receive(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **named: Any) -> Any:
            found = real(self, *args, **named)
            if self.type in other_end:
                note(ACQUIRE, key(self, other_end[self.type]), 0, MESSAGE)
            return found

        return run

    wrapped(module.Socket, "send", send)
    wrapped(module.Socket, "recv", receive)


def connections(module: ModuleType) -> None:
    """Questions, and their answers as they come."""

    def send(real: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, request: bytes) -> None:
            _messages(RELEASE, self.connection, sent=True)
            real(self, request)

        return run

    def await_answer(real: Callable[..., int]) -> Callable[..., int]:
        def run(self: Any, into: memoryview) -> int:
            found = real(self, into)
            _messages(ACQUIRE, self.connection, sent=False)
            return found

        return run

    def receive(real: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, into: memoryview) -> None:
            real(self, into)
            _messages(ACQUIRE, self.connection, sent=False)

        return run

    wrapped(module.Answers, "send", send)
    wrapped(module.Answers, "await_answer", await_answer)
    wrapped(module.Answers, "receive", receive)


def landings(module: ModuleType) -> None:
    """Places that one thread after another reads into."""

    def take(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **named: Any) -> Any:
            found = real(self, *args, **named)
            if found is not None:
                note(ACQUIRE, number(self), 0, OBJECT)
            return found

        return run

    def give(real: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, landing: Any) -> None:
            note(RELEASE, number(self), 0, OBJECT)
            real(self, landing)

        return run

    wrapped(module._Landings, "take", take)
    wrapped(module._Landings, "give", give)


def server(module: ModuleType) -> None:
    """Questions as they come, and answers."""

    def answer(real: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, one: Any, asked: bytes) -> None:
            _messages(ACQUIRE, one.sock, sent=False)
            real(self, one, asked)

        return run

    def send(real: Callable[..., None]) -> Callable[..., None]:
        def run(one: Any) -> None:
            _messages(RELEASE, one.sock, sent=True)
            real(one)

        return run

    wrapped(module.RegionServer, "_answer", answer)
    wrapped(module, "_send", send)


def staging(module: ModuleType) -> None:
    """Chunks of pinned memory, which sockets fill and empty."""

    def fill(real: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, into: Any, receive: Callable[[memoryview], None]) -> None:
            def received(view: memoryview) -> None:
                touched(view, WRITE)
                receive(view)

            real(self, into, received)

        return run

    def pieces(real: Callable[..., Iterator[memoryview]]) -> Callable[..., Iterator[memoryview]]:
        def run(self: Any, memory: Any) -> Iterator[memoryview]:
            for view in real(self, memory):
                touched(view, READ)
                yield view
                touched(view, READ)  # until the next is asked for

        return run

    def lend(real: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def run(self: Any, device: Any) -> Iterator[Any]:
            with real(self, device) as stage:
                note(ACQUIRE, number(stage), 0, OBJECT)
                try:
                    yield stage
                finally:
                    note(RELEASE, number(stage), 0, OBJECT)

        return run

    wrapped(module.Stage, "fill", fill)
    wrapped(module.Stage, "pieces", pieces)
    wrapped(module.Stages, "lend", lend)
