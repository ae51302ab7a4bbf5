"""A device that does its work late: what a member asks for happens only when a thread settles or follows a mark.

Heaps of shared memory get a `DataMover` that queues over a mock of CUDA's calls. What is tested is the rule of
`odc.memory.Lanes`: no word is stored and no lock given back before the work it speaks of has settled. Where a verb
forgets to, its peers read old bytes here, every time, while a real device would let it through on most days.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from odc.runtime.movers import cpu as cpu_mover


class DeferredLanes:
    """See `odc.memory.Lanes`: a queue of work a lane, a lane of its own for each thread outside any."""

    asynchronous = True

    def __init__(self) -> None:
        self._queues: dict[object, list[Callable[[], None]]] = {}
        self._here = threading.local()
        self.settled = 0

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
        queue, count = mark  # type: ignore[misc]
        self.ask(lambda: _run(queue, count))

    def settle(self) -> None:
        self.settled += 1
        _run(self._queue(), None)


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
            _run(queue, count)
        else:
            super().follow(mark)


class DeferredMover:
    """`cpu_mover`, later. Sources are read when the work is done, as a device reads them."""

    def __init__(self, lanes: DeferredLanes) -> None:
        self._lanes = lanes

    def publish(self, places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        self._lanes.ask(lambda: cpu_mover.publish(places, shards))

    def gather(
        self,
        outs: Sequence[torch.Tensor],
        offsets: Sequence[int],
        shards: int,
        sources: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        self._lanes.ask(lambda: cpu_mover.gather(outs, offsets, shards, sources))

    def put(self, address: int, source: int, nbytes: int) -> None:
        self._lanes.ask(lambda: ctypes.memmove(address, source, nbytes))  # type: ignore[arg-type,return-value]

    def add(self, places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self._lanes.ask(lambda: cpu_mover.add(places, values))

    accumulate = add
