"""A background thread with a short queue: fetches ahead of use, pushes behind backward.

Chose a daemon thread of our own over `concurrent.futures`, whose threads are joined at interpreter exit: a rank that
ends with an error must end, even while its worker still waits for a dead peer. A full queue blocks the caller, which
bounds the memory that queued work keeps alive.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable


class Job:
    """One piece of work, run once, by a worker or by the thread that needs it first."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._claim = threading.Lock()  # taken once, by whoever runs the work
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the work unless someone else has begun it or it was cancelled."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._work = _nothing  # drop what the work holds on to, before anyone is told that it is over
            self._done.set()

    def cancel(self) -> None:
        """Never begin; if begun, wait for the end and forget an error."""
        if self._claim.acquire(blocking=False):
            self._work = _nothing
            self._done.set()
        self._done.wait()

    def over(self) -> bool:
        """Whether it has run, or never will."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait for whoever runs it; raises what the work raised. The work itself has deadlines."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def result(self) -> None:
        """Run here if not begun, else wait; raises what the work raised."""
        self.run()
        self.wait()


def _nothing() -> None:
    return


class Worker:
    """Runs jobs one after the other, in the order of `submit`.

    Args:
        name: of the thread.
        depth: jobs that may wait; a further `submit` blocks.
    """

    def __init__(self, name: str, depth: int) -> None:
        self._queue: queue.Queue[Job | None] = queue.Queue(maxsize=depth)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; blocks while `depth` wait."""
        self._queue.put(job)

    def close(self) -> None:
        """End the thread once the queue is empty; never waits: the garbage collector may call it on any thread."""
        self._closing = True
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job.run()
            del job  # an idle worker keeps nothing alive
            if self._closing and self._queue.empty():
                return
