"""What an engine does, whichever it is, and how a connection to another host is set so that its death is noticed."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from odc.deadlines import READ_CHECK_S
from odc.errors import PeerLostError
from odc.net.handshake import READER
from odc.net.keep_alive import keep_engine_alive

PURPOSE = "read"  # of a connection to the engine of another rank, in its handshake
#: Raises if the job was aborted, given what this rank is doing.
Check = Callable[[str], None]
#: Connects to the listener of a rank (global) for `PURPOSE`; tries again, and raises, as `odc.net.network.dial` does.
Dial = Callable[[int, Check], socket.socket]

MOST_ANSWERED = 1 << 16
_TIMEVAL = struct.Struct("ll")


def no_check(doing: str) -> None:
    """Look at nothing."""


class Engine(Protocol):
    """Reads memory that ranks on other hosts expose, and exposes this rank's. Any thread may call any method.

    One engine serves all roots of a process. Ranks are global. A region is a name that means the same on every rank.
    Memory may lie on a device, where the caller's work on it must have settled. `only_into_own`: on a device, reads go
    into what this process has allocated only, not into what it has mapped of a peer's.
    """

    name: str
    only_into_own: bool

    def expose(self, region: str, memory: torch.Tensor) -> None:
        """Let admitted ranks read `memory`, uint8 [n] and contiguous, under a name that is not exposed yet."""
        ...

    def answer(self, name: str, function: Callable[[], bytes]) -> None:
        """Let admitted ranks have `function` called, once for each `ask`. It runs on a thread of the engine, beside
        other calls, and returns at once: at most `MOST_ANSWERED` bytes.
        """
        ...

    def withdraw(self, name: str) -> None:
        """Expose the region, or answer, no longer. Reads that are being answered may still look at the memory, which
        they keep alive.
        """
        ...

    def adopt(self, connection: socket.socket, rank: int, only: Mapping[str, range] | None = None) -> None:
        """Answer the reads of `rank`, which was admitted on this connection for `PURPOSE`; the engine owns it now.

        With `only` it is a process outside the job, which gets nothing but the answers and regions of these names, and
        of a region only bytes within the range.
        """
        ...

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

        Returns when all have come and, on a device, settled. `what` is said after "reading" in messages. Raises
        PeerLostError if the rank is gone, or does not expose these bytes; WaitTimeoutError if nothing came for the
        engine's timeout; whatever `check` raises, which is called now and then. After an error `into` holds anything.
        """
        ...

    def ask(self, rank: int, name: str, *, what: str = "an answer", check: Check = no_check) -> bytes:
        """What the function that `rank` answers with under `name` returns. It is called exactly once, unless this
        raises, as `read` does: then once or not at all.
        """
        ...

    def close(self) -> None:
        """End connections and threads; reads that go on raise. Idempotent, and called in forked children."""
        ...


def set_for_reader(connection: socket.socket, lost_after_s: float) -> None:
    """Have a receive wait for `READ_CHECK_S` at most, and fail some seconds after a link to that host would."""
    keep_engine_alive(connection, lost_after_s, sends_bulk=False)
    limit = _TIMEVAL.pack(int(READ_CHECK_S), int(READ_CHECK_S % 1 * 1e6))
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def set_for_server(connection: socket.socket, lost_after_s: float) -> None:
    """Have no call wait, and the connection end with the reader's host, but not because the reader takes its time."""
    keep_engine_alive(connection, lost_after_s, sends_bulk=True)
    connection.setblocking(False)


def hang_up(connection: socket.socket) -> None:
    """Close a connection that other threads may be waiting on; they wake."""
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def reading(me: int, rank: int, what: str) -> str:
    """The beginning of a message of rank `me`, or of a reader outside the job."""
    return f"{'reader' if me == READER else f'rank {me}'}, reading {what} of rank {rank}"


def lost(me: int, rank: int, what: str, why: object) -> PeerLostError:
    """The error of a read that found the other rank gone."""
    return PeerLostError(f"{reading(me, rank, what)}: {why}", culprit=rank)


def refused(me: int, rank: int, what: str, region: str, offset: int, nbytes: int) -> PeerLostError:
    """The error of a read of bytes that the other rank does not expose."""
    return lost(me, rank, what, f"it exposes no {nbytes} bytes at {offset} of {region!r} (any more)")


def bytes_of(memory: torch.Tensor) -> memoryview:
    """The bytes of a uint8 CPU tensor, which stays alive with them."""
    refuse_odd(memory)
    return memoryview(memory.numpy())  # type: ignore[arg-type]  # an array has a buffer


def refuse_odd(memory: torch.Tensor) -> None:
    """Raise ValueError unless `memory` is uint8 [n] and contiguous."""
    if memory.dtype is not torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
        raise ValueError(f"an engine moves contiguous uint8 [n], not {memory.dtype} {list(memory.shape)}")
