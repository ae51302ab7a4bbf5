"""What a process has of the network, in a job over several hosts: one listener, one secret, one engine.

A connection says at its admission what it comes for: an engine's reads, or the link of a root. Where a rank listens is
in the job's store (`odc/network/R`, with the global rank).
"""

from __future__ import annotations

import errno
import json
import os
import socket
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
from odc.net.accepting import remedy
from odc.net.address import own_address
from odc.net.admission import READER, AdmissionError, HungUpError, admit, export_purpose, job_secret, secret_for
from odc.net.engines import PURPOSE, Engine, make_engine
from odc.net.reception import Reception
from odc.net.store import JobStore
from odc.settings import LOST_AFTER_S, Settings

_TRIES = 6  # where the other end hangs up during admission
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT}  # as while a switch fails over

Welcome = Callable[[socket.socket, int], None]


class HostNetwork:
    """The listener and the engine of this process; drive the listener by `reception` (see there).

    `store` is torch's. Raises UnsupportedError where this host's address cannot be told or listened at, and as a
    JobStore does.
    """

    def __init__(self, store: Any, rank: int, settings: Settings) -> None:
        self.rank, self.pid = rank, os.getpid()
        self._store = JobStore(store, max(STORE_LEAST_S, settings.timeout_s), rank)
        address = own_address(store, settings.address)
        self._settings = settings
        self._secret = job_secret(self._store, settings.secret_file)
        self._purposes: dict[str, Welcome] = {}
        try:
            self.reception = Reception(address, self._secret, rank, self._welcome)
        except OSError as error:
            other = "set Settings(address=...) to an address of this host that the others reach"
            raise UnsupportedError(
                f"rank {rank} cannot listen at {address} ({error}); {remedy(error, other)}"
            ) from error
        self.engine: Engine = make_engine(settings, rank, self._dial_engine, address)
        self._purposes[PURPOSE] = self.engine.adopt
        self._store.set(_key(rank), json.dumps([self.reception.address, self.reception.port]))

    @property
    def lost_after_s(self) -> float:
        """As in the settings; of all that this process has of the network."""
        return self._settings.lost_after_s

    def refuse_others(self, settings: Settings) -> None:
        """Raise UnsupportedError if `settings` name another address, secret file or lost_after_s than this listener was
        made with. Their defaults name none.
        """
        for name in ("address", "secret_file", "lost_after_s"):
            asked, have, default = (getattr(one, name) for one in (settings, self._settings, Settings()))
            if asked not in (default, have):
                raise UnsupportedError(
                    f"rank {self.rank} listens already, with {name}={have!r} and not {asked!r}: give the first model, "
                    "or exchange, these settings"
                )

    def expect(self, purpose: str, welcome: Welcome) -> None:
        """Have `welcome(connection, rank)` called, on the daemon's thread, for everybody who comes for `purpose`."""
        self._purposes[purpose] = welcome

    def expect_no_more(self, purpose: str) -> None:
        self._purposes.pop(purpose, None)

    def _welcome(self, purpose: str, rank: int, connection: socket.socket) -> None:
        welcome = self._purposes.get(purpose)
        if welcome is None:
            connection.close()
        else:
            welcome(connection, rank)

    def dial(self, rank: int, purpose: str, check: Callable[[str], None] = lambda doing: None) -> socket.socket:
        """An admitted connection to the listener of `rank` (global), for `purpose`; blocking.

        Waits for the rank to listen; `check`, given what this rank is doing, may raise to end that. Raises
        WaitTimeoutError if it does not come up, PeerLostError if it is gone or does not belong to this job.
        """
        address, deadline = self.address(rank, check), Deadline(self._store.timeout_s)
        while True:
            try:
                return connect(address, self._secret, self.rank, rank, purpose, check, self.lost_after_s)
            except TimeoutError as error:  # it lives: stopped, or holding on to its interpreter lock
                check(f"connecting to rank {rank}")
                if deadline.passed():
                    late = f"rank {self.rank}, {error}, and has not for {self._store.timeout_s:g} s"
                    raise WaitTimeoutError(late, culprit=rank) from error

    def _dial_engine(self, rank: int) -> socket.socket:
        """As `dial`, but asks once, as an engine asks again by itself: TimeoutError if the rank does not answer."""
        address = self.address(rank)
        return connect(address, self._secret, self.rank, rank, PURPOSE, lost_after_s=self.lost_after_s)

    def export_secret(self, identity: str) -> bytes:
        """What a process outside the job must know to read the weights of a root."""
        return secret_for(self._secret, export_purpose(identity))

    def address(self, rank: int, check: Callable[[str], None] = lambda doing: None) -> tuple[str, int]:
        """Where the listener of `rank` (global) is; waits, and raises, as `dial`."""
        doing = f"waiting for rank {rank} to listen for other hosts"
        late = f"rank {self.rank}, {doing}: it has not in {self._store.timeout_s:g} s"
        said = self._store.await_key(_key(rank), late, culprit=rank, check=lambda: check(doing))
        address, port = json.loads(said)
        return str(address), int(port)

    def close(self) -> None:
        """End the listener and the engine, with what goes on there."""
        self.reception.close()
        self.engine.close()


def connect(
    address: tuple[str, int],
    secret: bytes,
    me: int,
    rank: int,
    purpose: str,
    check: Callable[[str], None] = lambda doing: None,
    lost_after_s: float = LOST_AFTER_S,
) -> socket.socket:
    """An admitted connection of `me` to `rank`, which listens at `address`; blocking.

    A host that cannot be reached is tried again for `lost_after_s`. Raises PeerLostError, TimeoutError where the rank's
    host takes the connection and the rank does not answer, and what `check` does between two tries.
    """
    who = "reader" if me == READER else f"rank {me}"
    where = f"{who}, connecting to rank {rank} at {address[0]}:{address[1]}"
    backoff = Backoff(CONNECT_FIRST_PAUSE_S, CONNECT_LONGEST_PAUSE_S, growth=4.0)
    tries, unreachable = 0, Deadline(lost_after_s)
    while True:
        try:
            connection = socket.create_connection(address, max(CONNECT_S, lost_after_s))
        except OSError as error:
            if error.errno in _UNREACHABLE and not unreachable.passed():
                check(f"connecting to rank {rank}")
                backoff.sleep()
                continue
            raise PeerLostError(
                f"{where}: {error}; if that is not where this host reaches it, set Settings(address=...) there",
                culprit=rank,
            ) from error
        tries += 1
        try:
            return _admitted(connection, secret, me, rank, purpose)
        except (HungUpError, ConnectionResetError, BrokenPipeError) as error:
            if tries == _TRIES:
                raise PeerLostError(f"{where}: {error}", culprit=rank) from error
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno != errno.ETIMEDOUT:  # that is the kernel's
                raise TimeoutError(f"{where}: it does not answer") from error
            raise PeerLostError(f"{where}: {error}", culprit=rank) from error
        check(f"connecting to rank {rank}")
        backoff.sleep()  # it may be overrun by visitors, or this process was stopped for longer than it waits


def _admitted(connection: socket.socket, secret: bytes, me: int, rank: int, purpose: str) -> socket.socket:
    """The connection once it has gone through admission; one that does not is closed."""
    try:
        found = admit(connection, "client", secret, me, purpose=purpose, timeout_s=CONNECT_S)
        if found != rank:
            raise AdmissionError(f"rank {found} answers there")
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def _key(rank: int) -> str:
    return f"odc/network/{rank}"
