"""Reads over plain TCP: the kernel copies straight from the exposed memory and straight into the destination.

A thread that reads blocks in one system call for each answer, so it is woken at once and costs no turn of Python's lock
in between. A read takes one connection; several reads of one rank at a time take several, which stay open. What lies on
a device goes through pinned memory at its end.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

import torch

from odc.net.engines.connections import Answers, Connections
from odc.net.engines.engine import Check, Dial, bytes_of, no_check, refuse_odd, refused
from odc.net.engines.server import READ, RegionServer, request
from odc.net.engines.staging import Stages
from odc.settings import LOST_AFTER_S


class SocketEngine:
    """An `Engine` over plain TCP. Raises WaitTimeoutError where `timeout_s` pass without a byte."""

    name, only_into_own = "sockets", False

    def __init__(
        self,
        me: int,
        dial: Dial,
        timeout_s: float,
        stages: Stages | None = None,
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        self.me, self._stages = me, stages or Stages()
        self._server = RegionServer(lost_after_s, stages=self._stages)
        self._connections = Connections(me, dial, timeout_s, lost_after_s)

    def expose(self, region: str, memory: torch.Tensor) -> None:
        refuse_odd(memory)
        self._server.expose(region, memory)

    def answer(self, name: str, function: Callable[[], bytes]) -> None:
        self._server.answer(name, function)

    def withdraw(self, name: str) -> None:
        self._server.withdraw(name)

    def adopt(self, connection: socket.socket, rank: int, only: Mapping[str, range] | None = None) -> None:
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
        refuse_odd(into)
        nbytes = into.numel()
        asked = request(READ, region, offset, nbytes)
        with self._connections.lend(rank, what, check) as answers:
            if self._stages.needed(into):
                length = answers.ask(asked, memoryview(b""))
                if length == nbytes:
                    self._fill(into, answers)
            else:
                length = answers.ask(asked, bytes_of(into))
            if length != nbytes:
                raise refused(self.me, rank, what, region, offset, nbytes)

    def _fill(self, into: torch.Tensor, answers: Answers) -> None:
        with self._stages.lend(into.device) as stage:
            stage.fill(into, answers.receive)

    def ask(self, rank: int, name: str, *, what: str = "an answer", check: Check = no_check) -> bytes:
        return self._connections.ask(rank, name, what, check)

    def close(self) -> None:
        self._connections.close()
        self._server.close()
