"""Reads from the heaps of members on other hosts, by an engine; a member's heap on this host is mapped."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from odc.deadlines import POOL_CHECK_S
from odc.errors import PeerLostError
from odc.net.engines import Engine, Reading
from odc.protocol.heap_reader import HeapRead, MappedHeaps, PassingRead
from odc.protocol.protocol import HOME, MemberProtocol
from odc.protocol.regions import LANDINGS

_CLAIM, _CLAIMS = "/claim", "/claims"  # what the home of a queue is asked for, after the root's identity


@dataclass(frozen=True)
class _Part:
    """What of `read` comes at once: `nbytes` from byte `offset` of the region on, for `into` or to be used.

    `lands`: by way of a landing. `last`: it ends the read.
    """

    read: HeapRead | PassingRead
    offset: int
    nbytes: int
    into: torch.Tensor | None
    lands: bool
    last: bool


@dataclass(frozen=True)
class _Going:
    """A part that is being read, into the landing of this number or straight to its place."""

    part: _Part
    reading: Reading
    landing: int | None


class _Landings:
    """Which landings of this rank are free. A thread that has a read going does not wait: another might for it."""

    def __init__(self, count: int) -> None:
        self._free, self._awaited, self._changed = list(range(count)), 0, threading.Condition()

    def take(self, wait: bool, check: Callable[[], None]) -> int | None:
        """The number of a landing; None if it is not to `wait`, and none is free or other threads wait for one.

        A thread that has one reads, by the engine's deadline. `check` is called now and then.
        """
        with self._changed:
            if not wait and self._awaited:
                return None
            self._awaited += wait
            try:
                while not self._free:
                    if not wait:
                        return None
                    self._changed.wait(POOL_CHECK_S)
                    check()
                return self._free.pop()
            finally:
                self._awaited -= wait

    def give(self, number: int | None) -> None:
        if number is not None:
            with self._changed:
                self._free.append(number)
                self._changed.notify()


class RemoteHeaps(MappedHeaps):
    """Every host exposes the heap of a root under its `identity` to the `engine`. Raises as `Engine.read` does."""

    def __init__(self, identity: str, engine: Engine, protocol: MemberProtocol) -> None:
        super().__init__(protocol)
        self._identity, self._engine = identity, engine
        self._landings = _Landings(LANDINGS)

    def read_all(self, reads: Iterable[HeapRead | PassingRead]) -> None:
        going = deque[_Going]()
        try:
            for one in reads:
                if not self._layout.grid.is_remote(one.member):
                    self._read_mapped(one)
                    continue
                for part in self._parts(one):
                    while (begun := self._begin(part, wait=not going)) is None:
                        self._end(going)
                    going.append(begun)
                    if len(going) == LANDINGS:
                        self._end(going)
            while going:
                self._end(going)
        finally:
            for dropped in going:
                dropped.reading.drop()
                self._landings.give(dropped.landing)

    def _parts(self, read: HeapRead | PassingRead) -> Iterator[_Part]:
        """One, or as many as fill a landing each: an engine may not reach a peer's memory."""
        layout, offset = self._layout, read.offset
        if isinstance(read, PassingRead):
            into = None if layout.landing_bytes else torch.empty(read.nbytes, dtype=torch.uint8, device="cpu")
            yield _Part(read, offset, read.nbytes, into, into is None, True)
            return
        into = read.into
        room = layout.landing_bytes if self._engine.only_into_own else 0
        lands = room > 0 and into.device == layout.heap.device and not layout.is_mine(into)
        parts = into.split(room) if lands else (into,)
        for number, part in enumerate(parts):
            yield _Part(read, offset, part.numel(), part, lands, number == len(parts) - 1)
            offset += part.numel()

    def _begin(self, part: _Part, wait: bool) -> _Going | None:
        """None if it would have to wait and is not to: for a landing, or for a connection."""
        layout, read = self._layout, part.read
        rank, (memory, start) = layout.grid.ranks[read.member], layout.heap.place(read.region)
        check = self._protocol.waiter.check
        landing, into = None, part.into
        if part.lands:
            landing = self._landings.take(wait, lambda: check(f"reading {read.what} of rank {rank}"))
            if landing is None:
                return None
            into = layout.landing(landing)[: part.nbytes]
        assert into is not None
        reading = None
        try:
            with self._explained(rank, read.what):
                region, at = self._identity + memory, start + part.offset
                reading = self._engine.begin(rank, region, at, into, what=read.what, check=check, wait=wait)
        finally:
            if reading is None:
                self._landings.give(landing)
        return None if reading is None else _Going(part, reading, landing)

    def _end(self, going: deque[_Going]) -> None:
        """Wait for the oldest part, and bring it from its landing to its place, or use it there."""
        ended = going.popleft()
        part, layout, read = ended.part, self._layout, ended.part.read
        try:
            with self._explained(layout.grid.ranks[read.member], read.what):
                ended.reading.finish()
            landed = None if ended.landing is None else layout.landing(ended.landing)[: part.nbytes]
            if isinstance(read, PassingRead):
                found = part.into if landed is None else landed
                assert found is not None
                read.use(found)
            elif landed is not None and part.into is not None:
                layout.mover.put(part.into.data_ptr(), landed.data_ptr(), part.nbytes)
                layout.heap.lanes.settle()
        finally:
            self._landings.give(ended.landing)
        if part.last and isinstance(read, HeapRead):
            read.then()

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
