"""Mutual admission over TCP: before a connection carries anything, both ends prove that they know the job's secret.

    client -> hello: magic, nonce, rank, purpose        server -> hello
    client -> HMAC-SHA256("client", both hellos)        server checks it, -> HMAC-SHA256("server", both hellos)

A visitor without the secret gets a nonce and nothing else, and is given two seconds. What follows on an admitted
connection is neither encrypted nor signed (docs/hosts.md).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
from pathlib import Path
from typing import Literal

from odc.deadlines import ADMISSION_S, Deadline
from odc.errors import ConfigError
from odc.net.store import JobStore

_MAGIC = b"odc-hst1"
_HELLO = struct.Struct("!8s32sI64s")  # magic, nonce, global rank, purpose
_MAC = hashlib.sha256().digest_size
_SECRET_KEY = "odc/secret"

_EXPORT = "export "  # begins the purpose of a reader outside the job
READER = 0xFFFFFFFF  # what such a reader gives for its rank

Role = Literal["client", "server"]


class AdmissionError(ConnectionError):
    """The other end does not know the job's secret, or does not speak this protocol."""


class HungUpError(AdmissionError):
    """The other end hung up: it does not know this secret, was waited for too long, or is overrun by visitors."""


class Visitor:
    """The server's side of one admission, without a socket: feed it what arrives, send what it returns.

    Attributes:
        hello: to be sent at once.
        wanted: bytes that the visitor has still to send; 0 once it is admitted.
        rank, purpose: what the visitor says; to be believed once `wanted` is 0.
    """

    def __init__(self, secret: bytes, rank: int) -> None:
        self._secret, self._hello = secret, _hello(rank, "")
        self._received = bytearray()
        self._theirs = b""
        self.wanted = _HELLO.size
        self.rank, self.purpose = -1, ""

    def feed(self, data: bytes) -> bytes:
        """Take at most `wanted` bytes; returns what to send now. Raises AdmissionError for anybody who does not belong
        here.
        """
        if len(data) > self.wanted:
            raise AdmissionError("said too much")
        self._received += data
        self.wanted -= len(data)
        if self.wanted:
            return b""
        said, self._received = bytes(self._received), bytearray()
        if not self._theirs:
            self.rank, self.purpose = _read_hello(said)
            self._secret = secret_for(self._secret, self.purpose)
            self._theirs, self.wanted = said, _MAC
            return self._hello
        if not hmac.compare_digest(said, _mac(self._secret, "client", said_by_client=self._theirs, server=self._hello)):
            raise AdmissionError("does not know the job's secret")
        return _mac(self._secret, "server", said_by_client=self._theirs, server=self._hello)


def admit(
    connection: socket.socket,
    role: Role,
    secret: bytes,
    rank: int,
    *,
    purpose: str = "",
    timeout_s: float = ADMISSION_S,
) -> int:
    """Go through admission on a blocking `connection` as `role`; returns the global rank at the other end.

    A client's `secret` is that for its purpose (see `secret_for`), a server's the job's.
    `purpose` (64 bytes at most) is what the client comes for; a server refuses a client with another one. The
    connection's own timeout is afterwards as it was before. Raises AdmissionError where the other end does not belong
    to this job, and TimeoutError or another OSError where it does not answer in time.
    """
    before, deadline = connection.gettimeout(), Deadline(timeout_s)
    try:
        if role == "server":
            return _admit_visitor(connection, Visitor(secret, rank), purpose, deadline)
        mine = _hello(rank, purpose)
        _send(connection, mine, deadline)
        theirs = _receive(connection, _HELLO.size, deadline)
        other, _ = _read_hello(theirs)
        _send(connection, _mac(secret, "client", said_by_client=mine, server=theirs), deadline)
        proof = _receive(connection, _MAC, deadline)
        if not hmac.compare_digest(proof, _mac(secret, "server", said_by_client=mine, server=theirs)):
            raise AdmissionError("the listener does not know the job's secret")
        return other
    finally:
        connection.settimeout(before)


def _admit_visitor(connection: socket.socket, visitor: Visitor, purpose: str, deadline: Deadline) -> int:
    while visitor.wanted:
        answer = visitor.feed(_receive(connection, visitor.wanted, deadline))
        if visitor.purpose != purpose:
            raise AdmissionError(f"came for {visitor.purpose!r}, not for {purpose!r}")
        _send(connection, answer, deadline)
    return visitor.rank


def _hello(rank: int, purpose: str) -> bytes:
    said = purpose.encode()
    if len(said) > 64 or b"\0" in said:
        raise ValueError(f"a purpose is text of at most 64 bytes, not {purpose!r}")
    return _HELLO.pack(_MAGIC, secrets.token_bytes(32), rank, said)


def _read_hello(said: bytes) -> tuple[int, str]:
    magic, _, rank, purpose = _HELLO.unpack(said)
    if magic != _MAGIC:
        raise AdmissionError("does not speak odc's protocol")
    return rank, purpose.rstrip(b"\0").decode("utf-8", "replace")


def _mac(secret: bytes, role: Role, *, said_by_client: bytes, server: bytes) -> bytes:
    return hmac.digest(secret, role.encode() + said_by_client + server, "sha256")


def _send(connection: socket.socket, data: bytes, deadline: Deadline) -> None:
    _remain(connection, deadline)
    connection.sendall(data)


def _receive(connection: socket.socket, nbytes: int, deadline: Deadline) -> bytes:
    """Exactly `nbytes`: what comes after them belongs to whoever uses the connection next."""
    found = bytearray()
    while len(found) < nbytes:
        _remain(connection, deadline)
        chunk = connection.recv(nbytes - len(found))
        if not chunk:
            raise HungUpError("hung up: it may not know the job's secret, or belong to another job")
        found += chunk
    return bytes(found)


def _remain(connection: socket.socket, deadline: Deadline) -> None:
    left = deadline.remaining()
    if left <= 0:
        raise TimeoutError("the other end did not go through admission in time")
    connection.settimeout(left)


def export_purpose(identity: str) -> str:
    """What a reader of the weights of a root comes for."""
    return _EXPORT + identity


def secret_for(secret: bytes, purpose: str) -> bytes:
    """What must be known to be admitted for `purpose`: the job's secret; of a reader one that opens nothing else."""
    return hmac.digest(secret, purpose.encode(), "sha256") if purpose.startswith(_EXPORT) else secret


def job_secret(store: JobStore, secret_file: str = "") -> bytes:
    """The secret that every process of the job knows: drawn by the first that asks, and left in the job's store.

    With `secret_file` the file's bytes count as well, so that reading the store is not enough. Raises as a JobStore
    does, and ConfigError where the file cannot be read or is empty.
    """
    drawn = store.compare_set(_SECRET_KEY, "", secrets.token_hex(32))
    if not secret_file:
        return hashlib.sha256(drawn).digest()
    try:
        known = Path(secret_file).read_bytes()
    except OSError as error:
        raise ConfigError(f"Settings(secret_file={secret_file!r}) cannot be read: {error}") from error
    if not known.strip():
        raise ConfigError(f"Settings(secret_file={secret_file!r}) is empty")
    return hmac.digest(known, drawn, "sha256")
