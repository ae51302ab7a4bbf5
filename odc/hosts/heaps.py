"""Reads from the heaps of members on other hosts, by an engine; a member's heap on this host is mapped."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import torch

from odc.errors import PeerLostError
from odc.net.engines import Engine
from odc.protocol.heap_reader import MappedHeaps
from odc.protocol.protocol import HOME, MemberProtocol

_CLAIM, _CLAIMS = "/claim", "/claims"  # what the home of a queue is asked for, after the root's identity


class RemoteHeaps(MappedHeaps):
    """Every host exposes the heap of a root under its `identity` to the `engine`. Raises as `Engine.read` does."""

    def __init__(self, identity: str, engine: Engine, protocol: MemberProtocol) -> None:
        super().__init__(protocol)
        self._identity, self._engine = identity, engine
        self._landing = threading.Lock()

    def read(self, member: int, region: str, offset: int, into: torch.Tensor, what: str) -> None:
        layout = self._layout
        if not layout.grid.is_remote(member):
            super().read(member, region, offset, into, what)
            return
        landing = layout.landing if self._engine.only_into_own else None
        if landing is None or into.device != layout.heap.device or layout.is_mine(into):
            self._read(member, region, offset, into, what)
            return
        with self._landing:
            for part in into.split(landing.numel()):
                landed = landing[: part.numel()]
                self._read(member, region, offset, landed, what)
                layout.mover.put(part.data_ptr(), landed.data_ptr(), part.numel())
                layout.heap.lanes.settle()
                offset += part.numel()

    def _read(self, member: int, region: str, offset: int, into: torch.Tensor, what: str) -> None:
        check = self._protocol.waiter.check
        rank, (part, start) = self._layout.grid.ranks[member], self._layout.heap.place(region)
        with self._explained(rank, what):
            self._engine.read(rank, self._identity + part, start + offset, into, what=what, check=check)

    def claim(self) -> int:
        """As in `HeapReader`; raises as `Engine.ask` does where home is on another host."""
        if not self._layout.grid.is_remote(HOME):
            return super().claim()
        number = self._ask(_CLAIM, "the next number of the queue")
        self._protocol.note_claim(number)
        return number

    def claims(self) -> int:
        if not self._layout.grid.is_remote(HOME):
            return super().claims()
        return self._ask(_CLAIMS, "how much of the queue is claimed")

    def _ask(self, name: str, what: str) -> int:
        rank, check = self._layout.grid.ranks[HOME], self._protocol.waiter.check
        with self._explained(rank, what):
            return int.from_bytes(self._engine.ask(rank, self._identity + name, what=what, check=check), "big")

    @contextlib.contextmanager
    def _explained(self, rank: int, what: str) -> Iterator[None]:
        try:
            yield
        except PeerLostError:
            self._protocol.waiter.await_reason(f"reading {what} of rank {rank}")
            raise


def queue_answers(identity: str, protocol: MemberProtocol) -> dict[str, Callable[[], bytes]]:
    """What the home of a root's queue answers other hosts with, by name; on any thread."""

    def answer(number: Callable[[], int]) -> bytes:
        return number().to_bytes(8, "big")

    counts = {_CLAIM: protocol.claim_at_home, _CLAIMS: protocol.claims_at_home}
    return {identity + name: functools.partial(answer, number) for name, number in counts.items()}
