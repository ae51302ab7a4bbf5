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

import numpy as np
import pytest
import torch

from odc.memory import shm
from odc.movers.cuda import CudaMover
from odc.protocol import layout


class DeferredLanes:
    """See `odc.memory.Lanes`: a queue of work a lane, a lane of its own for each thread outside any."""

    asynchronous = True

    def __init__(self) -> None:
        self._queues: dict[object, list[Callable[[], None]]] = {}
        self._here = threading.local()
        self.skipped = frozenset[str]()  # functions whose settles do not wait, by qualified name
        self._running = threading.RLock()  # threads that share a lane do not run its work twice, nor at once
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
        self.ask(lambda: self._run(queue, count))

    def settle(self) -> None:
        if sys._getframe(1).f_code.co_qualname in self.skipped:
            return
        self.settled += 1
        self._run(self._queue(), None)

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


class DeferredMover:
    """`CudaMover` over host memory, later. Sources are read when the work is done, as a device reads them.

    With `atomic` its direct adds need no lock: the lanes run one piece of work at a time.
    """

    def __init__(self, lanes: DeferredLanes, atomic: bool = False) -> None:
        self._lanes, self._mover, self.atomic = lanes, CudaMover(0, 256, move_all), atomic

    def __getattr__(self, name: str) -> Callable[..., None]:
        work = getattr(self._mover, name)
        return lambda *args: self._lanes.ask(lambda: work(*args))

    def prepare(self, *asked: object) -> None:
        """Kept: there is nothing to compile."""
        self.prepared = asked

    def put(self, address: int, source: int, nbytes: int) -> None:
        self._lanes.ask(lambda: ctypes.memmove(address, source, nbytes))  # type: ignore[arg-type,return-value]

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


def late_heaps(patch: pytest.MonkeyPatch, *, atomic: bool = False) -> list[DeferredLanes]:
    """Make every heap of this process from now on do its work late; gives the lanes of each, in the order made."""
    made: list[DeferredLanes] = []

    def lanes() -> DeferredLanes:
        made.append(DeferredLanes())
        return made[-1]

    patch.setattr(shm, "HostLanes", lanes)
    patch.setattr(layout, "mover_for", lambda settings, device, own: DeferredMover(made[-1], atomic))
    return made
