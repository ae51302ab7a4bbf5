"""How each end of a connection proves that it belongs to the job: by its process on one host, by a secret over TCP.

    client -> hello: magic, nonce, rank, purpose        server -> hello
    client -> HMAC-SHA256("client", both hellos)        server checks it, -> HMAC-SHA256("server", both hellos)

A peer without the secret receives a nonce and nothing else. What follows on an admitted connection is neither encrypted
nor signed (docs/hosts.md).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from odc.errors import ConfigError
from odc.net.conversation import Conversation, Turn
from odc.net.store import JobStore

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_MAGIC = b"odc-hst1"
_HELLO = struct.Struct("!8s32sI64s")  # magic, nonce, global rank, purpose
_MAC = hashlib.sha256().digest_size
_SECRET_KEY = "odc/secret"

_EXPORT = "export "  # begins the purpose of a reader outside the job
READER = 0xFFFFFFFF  # the rank that such a reader gives


class HandshakeError(ConnectionError):
    """The other end does not know the job's secret, or does not speak this protocol."""


@dataclass(frozen=True)
class PeerCredentials:
    """The process at the other end of a Unix connection, according to the kernel: process id and user id."""

    pid: int
    uid: int

    @classmethod
    def of(cls, connection: socket.socket) -> PeerCredentials:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return cls(pid, uid)

    def refusal(self, proc: Path = Path("/proc")) -> str | None:
        """Why this is not a process of our own user and container, or None if it is.

        User ids are compared as our user namespace numbers them; processes of other namespaces are recognised by their
        links in `proc`. Where this process cannot read its own links (no procfs), a visible process id must do.
        """
        if self.uid != os.geteuid():
            return f"it belongs to user {self.uid}, not to user {os.geteuid()}"
        if self.pid <= 0:
            return "its process is in another PID namespace; ranks of one host must share theirs"
        for kind in ("pid", "user"):
            try:
                own = os.readlink(proc / "self" / "ns" / kind)
            except OSError:
                continue
            try:
                other = os.readlink(proc / str(self.pid) / "ns" / kind)
            except OSError as error:
                return f"the {kind} namespace of its process {self.pid} cannot be read ({error.strerror})"
            if own != other:
                return f"its process {self.pid} is in another {kind} namespace; ranks of one host must share theirs"
        return None


@dataclass(frozen=True)
class Admitted:
    """The other end of a connection whose handshake has succeeded: its global rank, and what it connects for."""

    rank: int
    purpose: str


def answer_handshake(secret: bytes, rank: int) -> Conversation[Admitted]:
    """The listener's side, of global rank `rank`. Raises HandshakeError for a peer that does not belong here."""
    theirs = yield Turn(wanted=_HELLO.size)
    admitted = _read_hello(theirs)
    secret, mine = secret_for(secret, admitted.purpose), hello(rank, "")
    proof = yield Turn(mine, _MAC)
    if not hmac.compare_digest(proof, _mac(secret, b"client", theirs, mine)):
        raise HandshakeError("does not know the job's secret")
    yield Turn(_mac(secret, b"server", theirs, mine))
    return admitted


def begin_handshake(secret: bytes, rank: int, purpose: str) -> Conversation[int]:
    """The side that connects; returns the global rank at the other end.

    `secret` is that for the purpose (see `secret_for`), which has at most 64 bytes. Raises HandshakeError where the
    listener does not belong to this job.
    """
    mine = hello(rank, purpose)
    theirs = yield Turn(mine, _HELLO.size)
    proof = yield Turn(_mac(secret, b"client", mine, theirs), _MAC)
    if not hmac.compare_digest(proof, _mac(secret, b"server", mine, theirs)):
        raise HandshakeError("the listener does not know the job's secret")
    return _read_hello(theirs).rank


def hello(rank: int, purpose: str) -> bytes:
    """The first message of either side, with a fresh nonce."""
    text = purpose.encode()
    if len(text) > 64 or b"\0" in text:
        raise ValueError(f"a purpose is text of at most 64 bytes, not {purpose!r}")
    return _HELLO.pack(_MAGIC, secrets.token_bytes(32), rank, text)


def _read_hello(data: bytes) -> Admitted:
    magic, _, rank, purpose = _HELLO.unpack(data)
    if magic != _MAGIC:
        raise HandshakeError("does not speak odc's protocol")
    return Admitted(rank, purpose.rstrip(b"\0").decode("utf-8", "replace"))


def _mac(secret: bytes, role: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.digest(secret, role + client + server, "sha256")


def export_purpose(identity: str) -> str:
    """The purpose of a reader of the weights of a root."""
    return _EXPORT + identity


def link_purpose(identity: str) -> str:
    """The purpose of a link of a root or an exchange, whose name may be of any length."""
    return "link " + hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def secret_for(secret: bytes, purpose: str) -> bytes:
    """The secret that admits for `purpose`: the job's; for a reader's one that opens nothing else."""
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
