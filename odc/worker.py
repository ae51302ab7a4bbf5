"""Work on a background thread: jobs that run once, in order, on a worker or on the thread that needs one first.

A worker's thread is a daemon thread, because `concurrent.futures` joins its own at exit: a rank that ends with an error
must end, even while its worker still waits for a dead peer. No method takes a lock that a finalizer on the same thread
could want, so a finalizer may submit and close.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """One piece of work, run at most once, by a worker or by the thread that needs it first.

    Attributes:
        error: what the work raised, once it is over.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        # Taken by the thread that runs the work, or drops it, and never given back. That thread may take it again:
        # where a signal's handler raised as it had just taken it, nothing was run.
        self._claim = threading.RLock()
        self._done = threading.Event()
        self._value: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run the work unless another thread has begun it or it was dropped."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            if self._work is not None:
                self._value = self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._work = None  # drop what the work refers to before any thread sees that it is over
            self._done.set()

    def drop(self) -> None:
        """Never begin; if begun, let it end."""
        if self._claim.acquire(blocking=False):
            self._work = None
            self._done.set()

    def cancel(self) -> None:
        """Never begin; if begun, wait for the end and forget an error."""
        self.drop()
        self._done.wait()

    def over(self, within_s: float | None = 0.0) -> bool:
        """Whether it has run, or never will, waited for so long; with None returns when that holds."""
        return self._done.wait(within_s)

    def wait(self) -> T:
        """Wait until it has run on another thread; returns or raises what the work did. The work has its deadlines."""
        self._done.wait()
        if self.error is not None:
            raise self.error
        value: Any = self._value
        return value  # type: ignore[no-any-return]

    def result(self) -> T:
        """As `wait`, after running the work here if no thread has begun it."""
        self.run()
        return self.wait()


class Worker:
    """Runs jobs one after the other, in the order of `submit`, on a thread that the first one starts.

    With a `depth`, so many jobs may wait, and `submit` blocks for room: that bounds the memory which they hold. The
    thread ends with the worker.
    """

    def __init__(self, name: str, depth: int | None = None) -> None:
        # Not a Queue: a finalizer may submit or close on a thread that holds the queue's lock at that moment.
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        # Of the newest jobs, as many as may wait and one that runs: set once each is over. Empty without a depth.
        self._newest = deque[threading.Event]((), 0 if depth is None else depth + 1)
        self._starting = threading.Lock()  # taken once
        # Not given the worker, or it would never end.
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, job: Job[Any]) -> None:
        """Raises RuntimeError where the system starts no thread; the job was not submitted then. Of several threads
        that submit the first jobs at once, one learns of it.
        """
        if self._starting.acquire(blocking=False):
            try:
                self._thread.start()
            except RuntimeError:
                self._starting.release()
                raise
        if self._newest and len(self._newest) == self._newest.maxlen:
            self._newest[0].wait()
        self._jobs.put(job)
        self._newest.append(job._done)

    def close(self, within_s: float = 0.0) -> None:
        """End the thread once it has run what was submitted, and wait so long for that; 0 never waits."""
        self._jobs.put(None)
        if within_s and self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(within_s)


def in_background(name: str, work: Callable[[], None]) -> None:
    """Do `work` on a thread of this name that ends with it; an error goes to `threading.excepthook`."""

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            found = type(error), error, error.__traceback__, threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs(found))

    Worker(name).submit(Job(guarded))


def _work(jobs: queue.SimpleQueue[Job[Any] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # an idle worker keeps nothing alive
