"""A device whose lanes are threads with queues: work runs by itself, one piece after the other in each lane.

Where `support.deferred` shows that a wait is missing, this shows a wait too many: a test shuts a lane, as long compute
does, and sees who goes on. Every wait ends after a minute, as a failure.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from odc.memory import shm
from odc.protocol import layout
from support.deferred import DeferredMover

DEADLINE_S = 60.0
COMPUTE = "compute"


class ThreadedLanes:
    """See `odc.memory.Lanes`; outside every lane a thread is in lane "compute". Close it.

    Attributes:
        waiting: lanes in which a thread of the host stands right now, as long as it does.
        asked: pieces of work and marks, by lane.
        failed: what work has raised.
    """

    asynchronous = True

    def __init__(self) -> None:
        self._queues: dict[str, queue.SimpleQueue[Callable[[], object] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._here, self._making = threading.local(), threading.Lock()
        self.waiting: list[str] = []
        self.asked: Counter[str] = Counter()
        self.failed: list[BaseException] = []

    def _name(self) -> str:
        return getattr(self._here, "name", COMPUTE)

    def ask(self, work: Callable[[], object]) -> None:
        """Do `work` in the current lane, after what was asked for there before."""
        name = self._name()
        with self._making:
            if name not in self._queues:
                self._queues[name] = queue.SimpleQueue()
                self._threads.append(threading.Thread(target=self._run, args=(self._queues[name],), daemon=True))
                self._threads[-1].start()
            self._queues[name].put(work)
            self.asked[name] += 1

    def _run(self, asked: queue.SimpleQueue[Callable[[], object] | None]) -> None:
        while (work := asked.get()) is not None:
            try:
                work()
            except BaseException as error:
                self.failed.append(error)

    @contextmanager
    def lane(self, name: str) -> Iterator[None]:
        before, self._here.name = self._name(), name
        try:
            yield
        finally:
            self._here.name = before

    def mark(self) -> threading.Event:
        mark = threading.Event()
        self.ask(mark.set)
        return mark

    def follow(self, mark: object) -> None:
        self.ask(lambda: _wait(mark))

    def settle(self) -> None:
        mark, name = self.mark(), self._name()
        self.waiting.append(name)
        try:
            _wait(mark)
        finally:
            self.waiting.remove(name)

    def reached(self, mark: object) -> bool:
        assert isinstance(mark, threading.Event)
        return mark.is_set()

    @contextmanager
    def shut(self, name: str = COMPUTE) -> Iterator[threading.Event]:
        """Inside the block, or until the event is set, a lane does nothing that is asked of it."""
        end = threading.Event()
        with self.lane(name):
            self.ask(lambda: _wait(end))
        try:
            yield end
        finally:
            end.set()

    def close(self) -> None:
        """End all lanes, once each has done what was asked of it; raises what work has raised."""
        for asked in self._queues.values():
            asked.put(None)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        if self.failed:
            raise self.failed[0]


def _wait(mark: object) -> None:
    assert isinstance(mark, threading.Event)
    assert mark.wait(DEADLINE_S), "a lane has not come to a mark"


@contextmanager
def threaded_heaps() -> Iterator[list[ThreadedLanes]]:
    """Heaps made inside the block have lanes that are threads; gives those of each, in the order made."""
    made: list[ThreadedLanes] = []

    def lanes() -> ThreadedLanes:
        made.append(ThreadedLanes())
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm, "HostLanes", lanes)
        patch.setattr(layout, "mover_for", lambda settings, device, own: DeferredMover(made[-1]))
        yield made
        for one in made:
            one.close()
