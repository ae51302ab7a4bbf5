"""What a process has of the network, in a job over several hosts: one listener, one secret, one engine.

A connection says at its admission what it comes for: an engine's reads, or the link of a root. Where a rank listens is
in the job's store (`odc/network/R`, with the global rank).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Any

from odc.errors import PeerLostError, UnsupportedError, WaitTimeoutError
from odc.runtime.admission import AdmissionError, admit, job_secret
from odc.runtime.engines import PURPOSE, Engine, make_engine
from odc.runtime.hosts import own_address
from odc.runtime.reception import Reception
from odc.runtime.store import JobStore
from odc.runtime.wait import Backoff, Deadline
from odc.settings import Settings

_CONNECT_S = 30.0  # that a live rank may take to answer: its daemon may wait for the interpreter lock
_POLL_S, _LONGEST_POLL_S = 0.002, 0.02

Welcome = Callable[[socket.socket, int], None]


class HostNetwork:
    """The listener and the engine of this process; drive the listener by `reception` (see there).

    `store` is torch's. Raises UnsupportedError where this host's address cannot be told or listened at, and as a
    JobStore does.
    """

    def __init__(self, store: Any, rank: int, settings: Settings) -> None:
        self.rank, self._store, self.pid = rank, JobStore(store, max(5.0, settings.timeout_s), rank), os.getpid()
        address = own_address(store, settings.address)
        self._secret = job_secret(self._store, settings.secret_file)
        self._purposes: dict[str, Welcome] = {}
        try:
            self.reception = Reception(address, self._secret, rank, self._welcome)
        except OSError as error:
            raise UnsupportedError(
                f"rank {rank} cannot listen at {address} ({error}); set Settings(address=...) to an address of this "
                "host that the others reach"
            ) from error
        self.engine: Engine = make_engine(settings.engine, rank, self._dial_engine, settings.timeout_s, address)
        self._purposes[PURPOSE] = self.engine.adopt
        self._store.set(_key(rank), json.dumps([self.reception.address, self.reception.port]))

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
        address = self._address(rank, check)
        where = f"rank {self.rank}, connecting to rank {rank} at {address[0]}:{address[1]}"
        try:
            connection = socket.create_connection(address, _CONNECT_S)
        except OSError as error:
            raise PeerLostError(
                f"{where}: {error}; if that is not where this host reaches it, set Settings(address=...) there",
                culprit=rank,
            ) from error
        try:
            found = admit(connection, "client", self._secret, self.rank, purpose=purpose, timeout_s=_CONNECT_S)
            if found != rank:
                raise AdmissionError(f"rank {found} answers there")
            connection.settimeout(None)
        except OSError as error:
            connection.close()
            raise PeerLostError(f"{where}: {error}", culprit=rank) from error
        return connection

    def _dial_engine(self, rank: int) -> socket.socket:
        return self.dial(rank, PURPOSE)

    def _address(self, rank: int, check: Callable[[str], None]) -> tuple[str, int]:
        deadline, backoff = Deadline(self._store.timeout_s), Backoff(_POLL_S, _LONGEST_POLL_S, growth=1.2)
        doing = f"waiting for rank {rank} to listen for other hosts"
        while (said := self._store.find(_key(rank))) is None:
            check(doing)
            if deadline.passed():
                late = f"rank {self.rank}, {doing}: it has not in {self._store.timeout_s:g} s"
                raise WaitTimeoutError(late, culprit=rank)
            backoff.sleep()
        address, port = json.loads(said)
        return str(address), int(port)

    def close(self) -> None:
        """End the listener and the engine, with what goes on there."""
        self.reception.close()
        self.engine.close()


def _key(rank: int) -> str:
    return f"odc/network/{rank}"
