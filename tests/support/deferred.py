"""A device that does its work late: what a member asks for happens only when a thread settles or follows a mark.

Heaps of shared memory get a `DataMover` that queues over a mock of CUDA's calls. What is tested is the rule of
`odc.memory.Lanes`: no word is stored and no lock given back before the work it speaks of has settled. Where a verb
forgets to, its peers read old bytes here, every time, while a real device would let it through on most days.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import pytest
import torch

from odc.memory import shm
from odc.movers import cpu
from odc.movers.cuda import CudaMover
from odc.movers.plans import Addition, PackedUnit
from odc.protocol import Gradient, layout
from odc.protocol.rounding import RoundedUnit
from support import change_tiles
from support.members import HeapGroup


class DeferredLanes:
    """See `odc.memory.Lanes`: a queue of work a lane, a lane of its own for each thread outside any."""

    asynchronous = True

    def __init__(self) -> None:
        self._queues: dict[object, list[Callable[[], None]]] = {}
        self._here = threading.local()
        self.skipped = frozenset[str]()  # functions whose settles do not wait, by qualified name
        self._running = threading.RLock()  # threads that share a lane do not run its work twice, nor at once
        self.settled = 0
        self._asked = set[tuple[int, int]]()  # marks that `reached` was asked for

    def _queue(self) -> list[Callable[[], None]]:
        name = getattr(self._here, "name", None) or threading.get_ident()
        return self._queues.setdefault(name, [])

    def ask(self, work: Callable[[], None]) -> None:
        """Do `work` later, in the current lane."""
        self._queue().append(work)

    @contextmanager
    def lane(self, name: str) -> Iterator[None]:
        before, self._here.name = getattr(self._here, "name", None), name
        try:
            yield
        finally:
            self._here.name = before

    def mark(self) -> tuple[list[Callable[[], None]], int]:
        queue = self._queue()
        return queue, len(queue)

    def follow(self, mark: object) -> None:
        assert getattr(self._here, "name", None) != "server", "lane server waits for another lane"
        queue, count = mark  # type: ignore[misc]
        self.ask(lambda: self._run(queue, count))

    def settle(self) -> None:
        if sys._getframe(1).f_code.co_qualname in self.skipped:
            return
        self.settled += 1
        self._run(self._queue(), None)

    def reached(self, mark: object) -> bool:
        """Not when it is first asked for a mark: the work is done when it is asked again."""
        queue, count = mark  # type: ignore[misc]
        if sys._getframe(1).f_code.co_qualname in self.skipped:
            return True
        key = id(queue), count
        if key not in self._asked:
            self._asked.add(key)
            return False
        self._run(queue, count)
        return True

    def _run(self, queue: list[Callable[[], None]], count: int | None) -> None:
        with self._running:
            _run(queue, count)


def _run(queue: list[Callable[[], None]], count: int | None) -> None:
    """The first `count` of the queue, each once: what ran leaves a gap, so that marks keep their place."""
    for i in range(len(queue) if count is None else min(count, len(queue))):
        work, queue[i] = queue[i], _nothing
        work()


def _nothing() -> None:
    return


class LateCopies(DeferredLanes):
    """The same beside compute that is not late: outside every lane a mark is followed at once."""

    def follow(self, mark: object) -> None:
        if getattr(self._here, "name", None) is None:
            queue, count = mark  # type: ignore[misc]
            self._run(queue, count)
        else:
            super().follow(mark)


def move_all(targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
    """In place of the copy engine."""
    for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, nbytes)


class Asked(Protocol):
    """Lanes of host memory."""

    def ask(self, work: Callable[[], None]) -> None: ...


class DeferredMover:
    """`CudaMover` over host memory, later. Sources are read when the work is done, as a device reads them.

    With `atomic` its direct adds need no lock: the lanes run one piece of work at a time.
    """

    packs = True

    def __init__(self, lanes: Asked, atomic: bool = False) -> None:
        self._lanes, self._mover, self.atomic = lanes, CudaMover(0, 256, move_all), atomic

    def __getattr__(self, name: str) -> Callable[..., None]:
        work = getattr(self._mover, name)
        return lambda *args: self._lanes.ask(lambda: work(*args))

    def prepare(self, *asked: object) -> None:
        """Kept: there is nothing to compile."""
        self.prepared = asked

    def zero(self, totals: Sequence[torch.Tensor]) -> None:
        self._lanes.ask(lambda: cpu.zero(totals))

    def put(self, address: int, source: int, nbytes: int) -> None:
        self._lanes.ask(lambda: ctypes.memmove(address, source, nbytes))  # type: ignore[arg-type,return-value]

    def pack(self, units: Sequence[PackedUnit], found: torch.Tensor) -> None:
        self._lanes.ask(lambda: publish_and_pack(units, found))

    def patches(self, params: Sequence[tuple[int, int, int]], device: torch.device) -> LatePatches:
        return LatePatches(self._lanes, params)

    def rounding(self, params: Sequence[tuple[int, int, bool]], device: torch.device) -> LateRounding:
        return LateRounding(self._lanes, params)

    def addition(self, places: Sequence[torch.Tensor], values: Sequence[Sequence[torch.Tensor]]) -> LateAddition:
        return LateAddition(self._lanes, self._mover.addition(places, values))

    def accumulate_all(
        self,
        values: Sequence[torch.Tensor],
        numels: Sequence[int],
        offsets: Sequence[int],
        accumulators: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        def add() -> None:
            for shard, total in accumulators:
                for value, numel, offset in zip(values, numels, offsets, strict=True):
                    part = value[shard * numel : (shard + 1) * numel]
                    total[offset : offset + part.numel()] += part

        self._lanes.ask(add)


def publish_and_pack(units: Sequence[PackedUnit], found: torch.Tensor) -> None:
    """As `DeviceMover.pack`, now."""
    for number, (places, before, shards, into) in enumerate(units):
        old = [one.clone() for one in before]
        cpu.publish(places, shards)
        packed = change_tiles.pack(list(zip(old, places, strict=True)))
        into.fill_(0xCC)
        if packed.numel():
            found[number] += (packed.numel() - change_tiles.directory_bytes(places)) // 4
        if packed.numel() <= into.numel():
            into[: packed.numel()] = packed


class LateAddition:
    """An `Addition`, later."""

    def __init__(self, lanes: Asked, now: Addition) -> None:
        self._lanes, self._now = lanes, now

    def run(self) -> None:
        self._lanes.ask(self._now.run)


class LatePatches:
    """As `Patches`, later."""

    def __init__(self, lanes: Asked, params: Sequence[tuple[int, int, int]]) -> None:
        self._lanes = lanes
        self._spans = [(at, at + numel * size, numel, size) for at, numel, size in params]
        self.directory_bytes = change_tiles.directory_bytes(
            [self._zeros(numel, size) for _, _, numel, size in self._spans]
        )

    @staticmethod
    def _zeros(numel: int, size: int) -> torch.Tensor:
        return torch.zeros(numel * size, dtype=torch.uint8).view(change_tiles.OF_SIZE[size])

    def run(self, shard: torch.Tensor, packed: torch.Tensor) -> None:
        params = [shard[begin:end].view(change_tiles.OF_SIZE[size]) for begin, end, _, size in self._spans]
        self._lanes.ask(lambda: change_tiles.patch(params, packed))


class LateRounding:
    """As `Rounding`, later."""

    def __init__(self, lanes: Asked, params: Sequence[tuple[int, int, bool]]) -> None:
        self._lanes, self._unit = lanes, RoundedUnit([(numel, coarse) for numel, _, coarse in params])

    def write(self, total: torch.Tensor, memory: torch.Tensor) -> None:
        self._lanes.ask(lambda: self._unit.write(total, memory))

    def add(self, total: torch.Tensor, memory: torch.Tensor, into: torch.Tensor) -> None:
        self._lanes.ask(lambda: self._unit.add(total, memory, into))

    def keep(self, total: torch.Tensor, memory: torch.Tensor, residual: torch.Tensor, used: Sequence[bool]) -> None:
        self._lanes.ask(lambda: self._unit.keep(total, memory, residual, used))


def late_heaps(patch: pytest.MonkeyPatch, *, atomic: bool = False) -> list[DeferredLanes]:
    """Make every heap of this process from now on do its work late; gives the lanes of each, in the order made."""
    made: list[DeferredLanes] = []

    def lanes() -> DeferredLanes:
        made.append(DeferredLanes())
        return made[-1]

    patch.setattr(shm, "HostLanes", lanes)
    patch.setattr(layout, "mover_for", lambda settings, device, own: DeferredMover(made[-1], atomic))
    return made


def push(group: HeapGroup, lanes: DeferredLanes, member: int, index: int, sent: list[Gradient]) -> None:
    """Push gradients of a unit, whose memory is another's as soon as the push returns."""
    with lanes.lane("push"):
        group.members[member].pusher.push(group.units[index], sent)
    for gradient in sent:
        gradient.values.fill_(777.0)


@contextmanager
def late(skipped: frozenset[str] = frozenset()) -> Iterator[list[LateCopies]]:
    """Heaps made inside the block copy late; gives their lanes. Functions in `skipped` do not wait for them."""
    made: list[LateCopies] = []

    def lanes() -> LateCopies:
        made.append(LateCopies())
        made[-1].skipped = skipped
        return made[-1]

    before = shm.HostLanes, layout.mover_for
    shm.HostLanes, layout.mover_for = lanes, lambda settings, device, own: DeferredMover(made[-1])  # type: ignore[misc,assignment]
    try:
        yield made
    finally:
        shm.HostLanes, layout.mover_for = before  # type: ignore[misc]
