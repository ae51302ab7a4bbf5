"""Reads over plain TCP: the kernel copies straight from the exposed memory and straight into the destination.

A thread that reads blocks in one system call for each answer, so it is woken at once and costs no turn of Python's lock
in between. A read takes one connection; several reads of one rank at a time take several, which stay open. What lies on
a device goes through pinned memory at its end.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Mapping

import torch

from odc.errors import PeerLostError
from odc.net.engines.connections import Answers, Check, Connections, Dial, NoneFree, no_check
from odc.net.engines.server import ASK, DESCRIBE, READ, REFUSED, RegionServer, request
from odc.net.engines.staging import Stages, bytes_of, refuse_odd
from odc.settings import LOST_AFTER_S

PURPOSE = "read"  # of a connection to the engine of another rank, in its handshake
MOST_ANSWERED = 1 << 16
_MOST_CONNECTIONS = 4  # to one rank


class Reading:
    """A read that is in progress. The thread that began it ends it, by `finish` or by `drop`."""

    def __init__(
        self, resources: contextlib.ExitStack, await_: Callable[[], bool], refused: Callable[[], PeerLostError]
    ) -> None:
        self._resources, self._await, self._refused = resources, await_, refused

    def finish(self) -> None:
        """Return when the bytes are there; raises as `Engine.read` does."""
        with self._resources:
            if not self._await():
                raise self._refused()

    def drop(self) -> None:
        """Give the read up: its destination holds anything, and the connection is ended. Does not wait."""
        with contextlib.suppress(_Dropped), self._resources:
            raise _Dropped


class _Dropped(Exception):  # ends a connection that is lent
    pass


class Engine:
    """Reads memory that ranks on other hosts expose, and exposes this rank's. Any thread may call any method.

    One engine serves all roots of a process. Ranks are global. A region is a name that means the same on every rank.
    Memory may lie on a device, where the caller's work on it must have settled. `only_into_own`: on a device, reads go
    into what this process has allocated only, not into what it has mapped of a peer's. Another engine overrides
    `_begin`, and what else it has to do for it.
    """

    name, only_into_own = "sockets", False

    def __init__(
        self,
        me: int,
        dial: Dial,
        timeout_s: float,
        lost_after_s: float = LOST_AFTER_S,
        *,
        stages: Stages | None = None,
        describe: Callable[[str], bytes] | None = None,
        most_connections: int = _MOST_CONNECTIONS,
    ) -> None:
        self.me, self._stages = me, stages or Stages()
        self._server = RegionServer(lost_after_s, describe, self._stages)
        self._connections = Connections(me, dial, timeout_s, lost_after_s, most_connections)

    def expose(self, region: str, memory: torch.Tensor) -> None:
        """Let admitted ranks read `memory`, uint8 [n] and contiguous, under a name that is not exposed yet."""
        refuse_odd(memory)
        self._server.expose(region, memory)

    def answer(self, name: str, function: Callable[[], bytes]) -> None:
        """Call `function` once for each `ask` of an admitted rank. It runs on a thread of the engine, beside others,
        and returns at once: at most `MOST_ANSWERED` bytes.
        """
        self._server.answer(name, function)

    def withdraw(self, name: str) -> None:
        """Expose the region, or answer, no longer. Reads that are being answered may still need the memory, which they
        keep alive. A name is used again once every rank has withdrawn it.
        """
        self._server.withdraw(name)

    def adopt(self, connection: socket.socket, rank: int, only: Mapping[str, range] | None = None) -> None:
        """Answer the reads of `rank`, which was admitted on this connection for `PURPOSE`; the engine owns it now.

        With `only` it is a process outside the job, which gets nothing but the answers and regions of these names, and
        of a region only bytes within the range.
        """
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
        """Fill `into`, uint8 [n] and contiguous, with the n bytes at `offset` of what `rank` exposes as `region`.

        Returns when all have come and, on a device, settled. `what` follows "reading" in messages. Raises PeerLostError
        if the rank is gone, or does not expose these bytes; WaitTimeoutError if nothing came for the engine's timeout;
        whatever `check` raises, which is called now and then. After an error `into` holds anything.
        """
        reading = self.begin(rank, region, offset, into, what=what, check=check)
        assert reading is not None
        reading.finish()

    def begin(
        self,
        rank: int,
        region: str,
        offset: int,
        into: torch.Tensor,
        *,
        what: str = "memory",
        check: Check = no_check,
        wait: bool = True,
    ) -> Reading | None:
        """Begin what `read` does, and end it by `finish`: a thread that keeps two reads going keeps the network busy.

        None where all connections to the rank are in use, unless it is to `wait` for one. Whoever has begun another
        read does not wait: threads that wait for each other's connections would do so for ever.
        """
        refuse_odd(into)
        try:
            with contextlib.ExitStack() as resources:
                answers = resources.enter_context(self._connections.lend(rank, what, check, wait=wait))
                await_ = self._begin(answers, region, offset, into, resources)
                refused = functools.partial(answers.refused, region, offset, into.numel())
                return Reading(resources.pop_all(), await_, refused)
        except NoneFree:
            return None

    def _begin(
        self, answers: Answers, region: str, offset: int, into: torch.Tensor, resources: contextlib.ExitStack
    ) -> Callable[[], bool]:
        """Ask for the bytes. Gives the function that waits until `into` is filled: False if the rank does not expose
        them. Both raise as `read` does, and OSError. `resources` are closed when the read is over or dropped.
        """
        answers.send(request(READ, region, offset, into.numel()))
        return functools.partial(self._receive, answers, into)

    def _receive(self, answers: Answers, into: torch.Tensor) -> bool:
        nbytes = into.numel()
        if not self._stages.needed(into):
            return answers.await_answer(bytes_of(into)) == nbytes
        if answers.await_answer(memoryview(b"")) != nbytes:
            return False
        with self._stages.lend(into.device) as stage:
            stage.fill(into, answers.receive)
        return True

    def _description(self, answers: Answers, region: str) -> bytes:
        """What the rank's engine adds to its region, b"" if nothing. Raises as `read` does, and OSError."""
        length = answers.ask(request(DESCRIBE, region), memoryview(b""))
        if length == REFUSED:
            raise answers.refused(region, 0, 0)
        described = bytearray(length)
        answers.receive(memoryview(described))
        return bytes(described)

    def ask(self, rank: int, name: str, *, what: str = "an answer", check: Check = no_check) -> bytes:
        """What the function that `rank` answers with under `name` returns. It is called exactly once, unless this
        raises, as `read` does: then once or not at all.
        """
        with self._connections.lend(rank, what, check) as answers:
            length = answers.ask(request(ASK, name), memoryview(b""))
            if length > MOST_ANSWERED:  # `REFUSED` is
                raise answers.lost(f"it does not answer {name!r} (any more)")
            found = bytearray(length)
            answers.receive(memoryview(found))
        return bytes(found)

    def close(self) -> None:
        """End connections and threads; reads that go on raise. Idempotent, and called in forked children."""
        self._connections.close()
        self._server.close()
