"""The TCP side of a process, in a job over several hosts: one listener, one secret, one engine.

A connection states its purpose in the handshake: an engine's reads, the link of a root, or the watch over neighbours.
The address of a rank's listener is in the job's store (`odc/network/R`, with the global rank).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import resource
import socket
import threading
from collections.abc import Callable
from typing import Any

from odc.deadlines import (
    CONNECT_FIRST_PAUSE_S,
    CONNECT_LONGEST_PAUSE_S,
    CONNECT_S,
    STORE_LEAST_S,
    Backoff,
    Deadline,
)
from odc.errors import PeerLostError, UnsupportedError, WaitTimeoutError
from odc.net.conversation import Conversation, HungUpError, converse
from odc.net.engines.connections import Check, Dial, no_check
from odc.net.engines.engine import PURPOSE, Engine
from odc.net.engines.nixl import NixlEngine, choose_engine
from odc.net.engines.nvshmem import NvshmemEngine
from odc.net.handshake import (
    READER,
    Admitted,
    HandshakeError,
    answer_handshake,
    begin_handshake,
    export_purpose,
    job_secret,
    secret_for,
)
from odc.net.listener import Listener, remedy
from odc.net.reactor import Reactor
from odc.net.store import JobStore
from odc.net.tcp import bind, own_address
from odc.settings import LOST_AFTER_S, Settings

_TRIES = 6  # where the other end hangs up during the handshake
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT}  # as while a switch fails over
_NO_PORT = "this machine has no free port left: widen sysctl net.ipv4.ip_local_port_range"
_LISTENING = ("address", "ports", "secret_file")  # settings that a listener keeps
_MOST_FILES = 1 << 16  # a hard limit may be a billion, and some programs that a rank starts close every number below it
_FIXED = (*_LISTENING, "lost_after_s")

Welcome = Callable[[socket.socket, int], None]


class HostNetwork:
    """The listener of this process and, once `open` was called, its engine.

    `store` is torch's. `check`, given what this rank is doing, may raise to end its wait for the store as it begins to
    listen. Raises UnsupportedError where this host's address cannot be determined or listened at, and as a JobStore
    does.
    """

    def __init__(self, reactor: Reactor, store: Any, rank: int, settings: Settings, check: Check = no_check) -> None:
        self.rank, self.store = rank, JobStore(store, max(STORE_LEAST_S, settings.timeout_s), rank)
        self._reactor, self._settings, self._torch_store, self._check = reactor, settings, store, check
        self._engine: Engine | None = None
        self._purposes: dict[str, Welcome] = {}
        self._listens = False
        _raise_limit_of_files()
        self._listener = self._listen()

    def _listen(self) -> Listener[Admitted]:
        settings = self._settings
        address = own_address(self._torch_store, settings.address)
        doing = f"rank {self.rank}, beginning to listen for other hosts"
        store = JobStore(self.store, self.store.timeout_s, self.rank, watch=lambda: self._check(doing))
        self._secret = job_secret(store, settings.secret_file)
        try:
            listening = bind(address, settings.ports)
            self._bound_to, port = listening.getsockname()[:2]  # an address in digits, whatever the setting names
            listener = Listener(self._reactor, listening, f"{address}:{port}", self._begin, self._welcome)
        except OSError as error:
            other = "set Settings(address=...) to an address of this host that the others reach"
            if error.errno == errno.EADDRINUSE:
                other = "widen the range in Settings(ports=...): each rank of a host takes one"
            raise UnsupportedError(
                f"rank {self.rank} cannot listen at {address} ({error}); {remedy(error, other)}"
            ) from error
        self.address = address, port
        try:
            store.set(_key(self.rank), json.dumps(self.address))
        except BaseException:  # the next try may need the port
            self._close(listener)
            raise
        self._listens = True
        return listener

    def _close(self, listener: Listener[Admitted]) -> None:
        """Return once its port is free, unless the loop is stuck."""
        closed = threading.Event()
        self._reactor.call(listener.close)
        self._reactor.call(closed.set)
        closed.wait(CONNECT_S)

    def open(self, settings: Settings) -> None:
        """Let roots with `settings` use it: make the engine, if no root has yet.

        A listener that was made for the watch, by the settings of another module, moves where these name another place.
        What they leave at the default stays as it is. Raises UnsupportedError if a root uses it, and `settings` name
        other places, another secret or lost_after_s.
        """
        if self._engine is not None:
            if name := self._other(settings, _FIXED):
                asked, have = getattr(settings, name), getattr(self._settings, name)
                raise UnsupportedError(
                    f"rank {self.rank} listens already, with {name}={have!r} and not {asked!r}: give the first model, "
                    "or exchange, these settings"
                )
            return
        moves = not self._listens or self._other(settings, _LISTENING)
        kept = {name: getattr(self._settings, name) for name in _FIXED if _is_default(settings, name)}
        before, self._settings = self._settings, dataclasses.replace(settings, **kept)
        if moves:
            self._listens = False
            self._close(self._listener)
            try:
                self._listener = self._listen()
            except BaseException:
                self._settings = before
                raise
        settings = self._settings
        self.store = self.store.within(max(STORE_LEAST_S, settings.timeout_s))
        self._engine = make_engine(
            settings, self.rank, lambda rank, check: self.dial(rank, PURPOSE, check), self._bound_to
        )
        self.expect(PURPOSE, self._engine.adopt)

    def _other(self, settings: Settings, names: tuple[str, ...]) -> str:
        """The first of these settings that differs from this listener's and is not the default; "" if none does."""
        for name in names:
            if getattr(settings, name) != getattr(self._settings, name) and not _is_default(settings, name):
                return name
        return ""

    @property
    def engine(self) -> Engine:
        """Once it is open."""
        assert self._engine is not None
        return self._engine

    @property
    def lost_after_s(self) -> float:
        """As in the settings; of the whole network of this process."""
        return self._settings.lost_after_s

    # connections from other ranks --------------------------------------------------------------------------------

    def expect(self, purpose: str, welcome: Welcome) -> None:
        """Call `welcome(connection, rank)`, on the loop's thread, for every rank that connects for `purpose`."""
        self._purposes[purpose] = welcome

    def expect_no_more(self, purpose: str) -> None:
        self._purposes.pop(purpose, None)

    def _begin(self, connection: socket.socket) -> Conversation[Admitted]:
        return answer_handshake(self._secret, self.rank)

    def _welcome(self, connection: socket.socket, admitted: Admitted) -> None:
        welcome = self._purposes.get(admitted.purpose)
        if welcome is None:
            connection.close()
        else:
            welcome(connection, admitted.rank)

    # connections to other ranks ----------------------------------------------------------------------------------

    def dial(self, rank: int, purpose: str, check: Check = no_check) -> socket.socket:
        """A connection to the listener of `rank` (global), for `purpose`; blocking.

        Waits for the rank to listen and to answer; `check`, given what this rank is doing, may raise to end that.
        Raises WaitTimeoutError if it does not, PeerLostError if it is gone or does not belong to this job.
        """
        return self._dial_at(self.address_of(rank, check), rank, purpose, self.store.timeout_s, check)

    def dial_if_listening(self, rank: int, purpose: str) -> socket.socket | None:
        """As `dial`, but waits for no rank: None if it does not listen yet."""
        found = self.store.find(_key(rank))
        return None if found is None else self._dial_at(_decoded(found), rank, purpose, 0.0, no_check)

    def _dial_at(
        self, address: tuple[str, int], rank: int, purpose: str, timeout_s: float, check: Check
    ) -> socket.socket:
        return dial(address, self._secret, self.rank, rank, purpose, timeout_s, check, self.lost_after_s)

    def address_of(self, rank: int, check: Check = no_check) -> tuple[str, int]:
        """Where the listener of `rank` (global) is; waits, and raises, as `dial`."""
        doing = f"waiting for rank {rank} to listen for other hosts"
        late = f"rank {self.rank}, {doing}: it has not in {self.store.timeout_s:g} s"
        # Watched: the store may be on a host that is cut off, and the job ends meanwhile.
        watched = JobStore(self.store, self.store.timeout_s, self.rank, watch=lambda: check(doing))
        found = watched.await_key(_key(rank), late, culprit=rank)
        return _decoded(found)

    def export_secret(self, identity: str) -> bytes:
        """The secret that admits a process outside the job to the weights of a root."""
        return secret_for(self._secret, export_purpose(identity))

    def close(self) -> None:
        """End the listener and the engine, with their connections."""
        self._listener.close()
        if self._engine is not None:
            self._engine.close()


def _is_default(settings: Settings, name: str) -> bool:
    return bool(getattr(settings, name) == getattr(Settings(), name))


def _raise_limit_of_files() -> None:
    """Let this process open as many files as it may need and may: a rank has sockets to the ranks of every host."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may refuse that
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_engine(settings: Settings, me: int, dial: Dial, address: str) -> Engine:
    """The engine of rank `me` (global). `address` is this host's, in digits; `dial` connects to other ranks."""
    if settings.memory == "nvshmem" and settings.engine == "auto":
        return NvshmemEngine(me, dial, settings.timeout_s, settings.lost_after_s)
    if choose_engine(settings.engine) == "nixl":
        return NixlEngine(me, dial, settings.timeout_s, address, settings.lost_after_s)
    return Engine(me, dial, settings.timeout_s, settings.lost_after_s)


def dial(
    address: tuple[str, int],
    secret: bytes,
    me: int,
    rank: int,
    purpose: str,
    timeout_s: float,
    check: Check = no_check,
    lost_after_s: float = LOST_AFTER_S,
) -> socket.socket:
    """A connection of `me`, after the handshake, to `rank`, which listens at `address`; blocking.

    Tried again are a host that cannot be reached, for `lost_after_s`; a rank that hangs up, as after its deadline for a
    handshake, a few times; and one that does not answer, which may be stopped, for `timeout_s`. Raises PeerLostError,
    WaitTimeoutError for the last, UnsupportedError where this process can open no more sockets, and what `check` raises
    between two tries.
    """
    who = "reader" if me == READER else f"rank {me}"
    doing = f"connecting to rank {rank}"
    where = f"{who}, {doing} at {address[0]}:{address[1]}"
    deadline, unreachable, tries = Deadline(timeout_s), Deadline(lost_after_s), _TRIES
    backoff = Backoff(CONNECT_FIRST_PAUSE_S, CONNECT_LONGEST_PAUSE_S, growth=4.0)
    while True:
        connection: socket.socket | None = None
        try:
            connection = socket.create_connection(address, max(CONNECT_S, lost_after_s))
            return _admitted(connection, secret, me, rank, purpose)
        except OSError as error:
            if connection is None:
                no_port = error.errno == errno.EADDRNOTAVAIL and ":" not in address[0]  # or IPv6 is off here
                if cure := remedy(error, _NO_PORT if no_port else ""):
                    raise UnsupportedError(f"{where}: {error}; {cure}") from error
                if error.errno not in _UNREACHABLE or unreachable.passed():
                    hint = "if that is not where this host reaches it, set Settings(address=...) there"
                    hint = f"{'the job may have ended; or, ' if me == READER else ''}{hint}"
                    raise PeerLostError(f"{where}: {error}; {hint}", culprit=rank) from error
            elif isinstance(error, TimeoutError) and error.errno != errno.ETIMEDOUT:  # that is the kernel's
                if deadline.passed():
                    late = f"{where}: it does not answer, and has not for {timeout_s:g} s"
                    raise WaitTimeoutError(late, culprit=rank) from error
            else:
                tries -= 1
                if not tries or not isinstance(error, ConnectionResetError | BrokenPipeError):
                    raise PeerLostError(f"{where}: {error}", culprit=rank) from error
        check(doing)
        backoff.sleep()


def _admitted(connection: socket.socket, secret: bytes, me: int, rank: int, purpose: str) -> socket.socket:
    """The connection once the handshake has succeeded; else it is closed."""
    try:
        found = converse(connection, begin_handshake(secret, me, purpose), Deadline(CONNECT_S))
        if found != rank:
            raise HandshakeError(f"rank {found} answers there")
    except HungUpError as error:
        connection.close()
        raise HungUpError("hung up: it may not know the job's secret, or belong to another job") from error
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def _decoded(address: bytes) -> tuple[str, int]:
    host, port = json.loads(address)
    return str(host), int(port)


def _key(rank: int) -> str:
    return f"odc/network/{rank}"
