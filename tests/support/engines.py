"""An engine in a rank process, with a listener for its peers, which exposes `pattern(rank)` as "heap"."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from odc.deadlines import Deadline
from odc.memory import HostLanes, Lanes
from odc.net.conversation import converse
from odc.net.engines import PURPOSE, Check, Engine, NixlEngine
from odc.net.engines.connections import Dial
from odc.net.engines.staging import Stages
from odc.net.handshake import answer_handshake, begin_handshake

SECRET = b"of this test"
SIZE = 3_000_017
PATIENCE_S = 600.0  # that a handshake may take on a busy machine


def pattern(rank: int, nbytes: int = SIZE) -> torch.Tensor:
    """Bytes that differ between ranks and places, uint8 [nbytes]."""
    return (torch.arange(nbytes, dtype=torch.int64) * 7919 % 251 + rank).to(torch.uint8)


class StagesOfHosts(Stages):
    """Has all memory go the way of a device's."""

    def needed(self, memory: torch.Tensor) -> bool:
        return True

    def _make_lanes(self, device: torch.device) -> Lanes:
        return HostLanes()


def make(engine: str, rank: int, dial: Dial, timeout_s: float, address: str) -> Engine:
    """The engine of this name; "staged" are sockets that take the host's memory for a device's."""
    if engine == "nixl":
        return NixlEngine(rank, dial, timeout_s, address)
    return Engine(rank, dial, timeout_s, stages=StagesOfHosts() if engine == "staged" else None)


class EnginePeer:
    """One rank's listener and engine; peers find it through the process group's store, under a name of the test's."""

    def __init__(self, rank: int, engine: str, name: str, timeout_s: float = 60.0) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._name, self.rank = name, rank
        self.address = own_address()
        self._listener = socket.create_server((self.address, 0), backlog=64)
        self.engine = make(engine, rank, self._dial, timeout_s, self.address)
        threading.Thread(target=self._listen, daemon=True).start()
        self._store.set(f"{name}/{rank}", f"{self.address}:{self._listener.getsockname()[1]}")

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                threading.Thread(target=self._admit, args=(accepted,), daemon=True).start()

    def _admit(self, accepted: socket.socket) -> None:
        try:
            admitted = converse(accepted, answer_handshake(SECRET, self.rank), Deadline(PATIENCE_S))
        except OSError:
            accepted.close()
        else:
            self.engine.adopt(accepted, admitted.rank)

    def _dial(self, rank: int, check: Check) -> socket.socket:
        host, port = self._store.get(f"{self._name}/{rank}").decode().split(":")
        connection = socket.create_connection((host, int(port)), PATIENCE_S)
        try:
            converse(connection, begin_handshake(SECRET, self.rank, PURPOSE), Deadline(PATIENCE_S))
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        self._listener.close()
        self.engine.close()


def own_address() -> str:
    """The address of eth0 in a host of the tests, or of the loopback interface."""
    number = socket.gethostname().removeprefix("host")
    return f"10.68.0.{int(number) + 1}" if number.isdigit() else "127.0.0.1"


@contextlib.contextmanager
def serving(rank: int, engine: str, name: str, timeout_s: float = 60.0) -> Iterator[Engine]:
    """The engine of this rank, which exposes "heap", once all ranks have theirs."""
    made = EnginePeer(rank, engine, name, timeout_s)
    made.engine.expose("heap", pattern(rank))
    dist.barrier()
    try:
        yield made.engine
    finally:
        made.close()
