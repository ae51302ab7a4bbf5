"""A background thread with a short queue: fetches ahead of use, pushes behind backward.

It is a daemon thread, because `concurrent.futures` joins its own at exit: a rank that ends with an error must end, even
while its worker still waits for a dead peer. A full queue blocks the caller, which bounds the memory it holds.
"""

from __future__ import annotations

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
            self._work = lambda: None  # drop what the work refers to, before anyone is told that it is over
            self._done.set()

    def cancel(self) -> None:
        """Never begin; if begun, wait for the end and forget an error."""
        if self._claim.acquire(blocking=False):
            self._work = lambda: None
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


class Worker:
    """Runs jobs one after the other, in the order of `submit`, of which `depth` may wait."""

    def __init__(self, name: str, depth: int) -> None:
        # Not a Queue: a finalizer calls `close`, perhaps on a thread that holds the queue's lock at that moment.
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._thread = threading.Thread(target=_work, args=(self._jobs, self._room), name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._room.acquire()
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread once it has run what was submitted; never waits: a finalizer may call it on any thread."""
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[Job | None], room: threading.Semaphore) -> None:
    while (job := jobs.get()) is not None:
        room.release()
        job.run()
        del job  # an idle worker keeps nothing alive
