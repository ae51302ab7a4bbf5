"""Requests to a rank of this host: one JSON object and one JSON reply, with descriptors beside it (SCM_RIGHTS).

Any process may listen and connect in the abstract namespace, so each side checks the other's process before it sends
anything.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from odc.deadlines import CONVERSATION_S, LISTENER_RETRY_S, Backoff, Deadline
from odc.net.conversation import MAX_FDS, Conversation, HungUpError, Turn, converse, limit_next_call
from odc.net.handshake import PeerCredentials
from odc.net.listener import Listener, abstract, bind_unix
from odc.net.reactor import Reactor

MAX_REQUEST = 64 << 10
MAX_REPLY = 16 << 20
_HEADER = struct.Struct("!I")  # length of the JSON that follows

_log = logging.getLogger(__name__)

Handler = Callable[[dict[str, Any], PeerCredentials], tuple[dict[str, Any], Sequence[int]]]


def serve_requests(reactor: Reactor, address: str, handler: Handler, limit_s: float = CONVERSATION_S) -> Listener[None]:
    """Listen at `address` in the abstract namespace; OSError if it is taken.

    `handler` gets a request and the process that sent it; it returns the reply and the descriptors to hand over, which
    it still owns. An exception that it raises is sent as {"error": text}. A client may take `limit_s` seconds.
    """

    def begin(connection: socket.socket) -> Conversation[None]:
        peer = PeerCredentials.of(connection)
        if (refusal := peer.refusal()) is not None:
            raise ConnectionError(refusal)
        return _serve(handler, peer, address)

    return Listener(reactor, bind_unix(address), address, begin, lambda connection, _: connection.close(), limit_s)


def _serve(handler: Handler, peer: PeerCredentials, address: str) -> Conversation[None]:
    (length,) = _HEADER.unpack((yield Turn(wanted=_HEADER.size)))
    if length > MAX_REQUEST:
        raise ValueError("request too long")
    request = json.loads((yield Turn(wanted=length)))
    if not isinstance(request, dict):
        raise ValueError("a request is a JSON object")
    try:
        reply, fds = handler(request, peer)
        if len(fds) > MAX_FDS:
            raise ValueError(f"{len(fds)} descriptors are more than the {MAX_FDS} that a reply may carry")
        data = frame(reply)
    except Exception as error:
        _log.warning("listener %s: request of process %d failed", address, peer.pid, exc_info=True)
        data, fds = frame({"error": f"{type(error).__name__}: {error}"}), ()
    yield Turn(data, fds=fds)


class NoAnswerError(ConnectionError):
    """The listener hung up: it ends, or it waited for this process, which was stopped, for longer than a client may
    take. A second request finds out which.
    """


@dataclass(frozen=True)
class Answer:
    """The answer of a listener. The caller owns `fds`; `pid` is the process that listens, according to the kernel."""

    reply: dict[str, Any]
    fds: list[int]
    pid: int


def ask(address: str, request: dict[str, Any], timeout_s: float) -> Answer:
    """Send a request to the listener at `address` and wait for its answer, on any thread.

    Raises ConnectionError if no process listens there or it is of another user or container, NoAnswerError if it hung
    up without an answer, TimeoutError if it did not answer within `timeout_s` seconds.
    """
    deadline, fds = Deadline(timeout_s), list[int]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            _connect(connection, address, deadline)
            peer = PeerCredentials.of(connection)
            if (refusal := peer.refusal()) is not None:
                raise ConnectionError(refusal)
            return Answer(converse(connection, _ask(request), deadline, fds), fds, peer.pid)
        except (OSError, ValueError, RecursionError) as error:  # the last of JSON that is nested without end
            for fd in fds:
                os.close(fd)
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"listener {address!r} did not answer within {timeout_s:g} s") from error
            hung_up = isinstance(error, HungUpError | ConnectionResetError | BrokenPipeError)
            raise (NoAnswerError if hung_up else ConnectionError)(f"listener {address!r}: {error}") from error


def _ask(request: dict[str, Any]) -> Conversation[dict[str, Any]]:
    (length,) = _HEADER.unpack((yield Turn(frame(request), _HEADER.size)))
    if length > MAX_REPLY:
        raise ValueError(f"its answer is too long: {length} bytes")
    reply = json.loads((yield Turn(wanted=length)))
    if not isinstance(reply, dict):
        raise ValueError("its answer is no JSON object")
    return reply


def _connect(connection: socket.socket, address: str, deadline: Deadline) -> None:
    backoff = Backoff(LISTENER_RETRY_S, LISTENER_RETRY_S)
    while True:
        limit_next_call(connection, deadline)
        try:
            return connection.connect(abstract(address))
        except BlockingIOError:  # the queue of connections is full
            backoff.sleep()


def frame(message: dict[str, Any]) -> bytes:
    """As a request or a reply is sent."""
    text = json.dumps(message).encode()
    return _HEADER.pack(len(text)) + text
