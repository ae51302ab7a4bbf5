"""Reads over plain TCP: the kernel copies straight from the exposed memory and straight into the destination.

A thread that reads blocks in one system call for each answer, so it is woken at once and costs no turn of Python's lock
in between. A read takes one connection; several reads of one rank at a time take several, which stay open.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection

import torch

from odc.runtime.engines.connections import Connections
from odc.runtime.engines.engine import Check, Dial, bytes_of, no_check, refused
from odc.runtime.engines.server import READ, RegionServer, request


class SocketEngine:
    """An `Engine` over plain TCP, for CPU memory. Raises WaitTimeoutError where `timeout_s` pass without a byte."""

    name = "sockets"

    def __init__(self, me: int, dial: Dial, timeout_s: float) -> None:
        self.me = me
        self._server = RegionServer()
        self._connections = Connections(me, dial, timeout_s)

    def expose(self, region: str, memory: torch.Tensor) -> None:
        bytes_of(memory)
        self._server.expose(region, memory)

    def answer(self, name: str, function: Callable[[], bytes]) -> None:
        self._server.answer(name, function)

    def withdraw(self, name: str) -> None:
        self._server.withdraw(name)

    def adopt(self, connection: socket.socket, rank: int, only: Collection[str] | None = None) -> None:
        self._server.adopt(connection, rank, only)

    def read(
        self,
        rank: int,
        region: str,
        offset: int,
        into: torch.Tensor,
        *,
        what: str = "memory",
        check: Check = no_check,
    ) -> None:
        view = bytes_of(into)
        with self._connections.lend(rank, what, check) as answers:
            if answers.ask(request(READ, region, offset, len(view)), view) != len(view):
                raise refused(self.me, rank, what, region, offset, len(view))

    def ask(self, rank: int, name: str, *, what: str = "an answer", check: Check = no_check) -> bytes:
        return self._connections.ask(rank, name, what, check)

    def close(self) -> None:
        self._connections.close()
        self._server.close()
