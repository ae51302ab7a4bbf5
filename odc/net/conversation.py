"""One side of an exchange of messages, without a socket: the same code serves a loop and a thread that waits."""

from __future__ import annotations

import socket
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from odc.deadlines import Deadline

MAX_FDS = 16
_FDS_SPACE = socket.CMSG_SPACE(4 * MAX_FDS)
_PIECE = 1 << 16
T = TypeVar("T")


@dataclass(frozen=True)
class Turn:
    """What a side does next: send `data`, with descriptors beside it, then receive exactly `wanted` bytes."""

    data: bytes = b""
    wanted: int = 0
    fds: Sequence[int] = ()


#: Yields turns, each of which is answered with the bytes that it wanted, and returns a result. Raises ValueError or
#: OSError where the other side does not keep to the protocol.
Conversation = Generator[Turn, bytes, T]


class HungUpError(ConnectionResetError):
    """The other end closed the connection before the conversation was over."""


def converse(
    connection: socket.socket, conversation: Conversation[T], deadline: Deadline, fds: list[int] | None = None
) -> T:
    """Hold a conversation on a blocking `connection`, whose own timeout is afterwards as it was before.

    Received descriptors are appended to `fds` at once, so that none leaks. Raises TimeoutError at the deadline,
    HungUpError, and what the conversation and the socket raise.
    """
    before = connection.gettimeout()
    try:
        turn = next(conversation)
        while True:
            if turn.data:
                limit_next_call(connection, deadline)
                connection.sendall(turn.data)
            turn = conversation.send(_receive(connection, turn.wanted, deadline, fds))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        connection.settimeout(before)


def _receive(connection: socket.socket, nbytes: int, deadline: Deadline, fds: list[int] | None) -> bytes:
    """Exactly `nbytes`: what comes after them belongs to the connection's next user."""
    found = bytearray()
    while len(found) < nbytes:
        limit_next_call(connection, deadline)
        # Not socket.recv_fds: it drops the flag, and the descriptors would be inherited by whatever this rank starts.
        space = 0 if fds is None else _FDS_SPACE
        chunk, ancillary, flags, _ = connection.recvmsg(
            min(nbytes - len(found), _PIECE), space, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and fds is not None:
                fds += memoryview(data[: len(data) // 4 * 4]).cast("i")
        if not chunk:
            raise HungUpError("hung up without an answer")
        if flags & socket.MSG_CTRUNC:
            raise ConnectionError("descriptors were lost on the way: too many are open here (ulimit -n)")
        found += chunk
    return bytes(found)


def limit_next_call(connection: socket.socket, deadline: Deadline) -> None:
    """Let the next call on `connection` last until `deadline`; TimeoutError if that has passed."""
    left = deadline.remaining()
    if left <= 0:
        raise TimeoutError("the other end did not answer in time")
    connection.settimeout(left)
