"""The one loop of a process: a thread that sleeps until a descriptor is ready, a process ends, or a task is due.

It polls nothing, except processes where the kernel refuses pidfds. What runs on the loop must not wait.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable

from odc.deadlines import PROCESS_POLL_S
from odc.memory import ProcessHandle, close_after_fork

Task = Callable[[], object]


def _nothing() -> None:
    return


class Registration:
    """A call that the reactor makes whenever its condition holds, until `cancel`."""

    def __init__(self, call: Task, forget: Task) -> None:
        self._call, self._forget, self.active = call, forget, True

    def __call__(self) -> None:
        self._call()

    def cancel(self) -> None:
        """Make no further call, not even for an event of the current round; idempotent.

        Before the descriptor is closed, on the loop's thread or once the loop has ended.
        """
        forget, self._call, self._forget, self.active = self._forget, _nothing, _nothing, False
        forget()


class Reactor:
    """The loop, on a thread `name`, and what it calls.

    `failed` is called with the error that ends the loop, if one does, and `ended` in any case, both on its thread.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], None], ended: Task = _nothing) -> None:
        self._pid, self._failed, self._ended = os.getpid(), failed, ended
        self._tasks: deque[Task] = deque()
        self._timers: list[tuple[float, int, Task]] = []
        self._numbers = itertools.count()  # timers that are due at once run in order
        self._stopping = self._over = False  # asked to end; has made all its calls
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, self._reset)
        close_after_fork(self)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # on the loop's thread ----------------------------------------------------------------------------------------

    def on_readable(self, fd: int, call: Task) -> Registration:
        """Call `call()` in every round in which `fd` is readable or at its end."""
        return self._register(fd, selectors.EVENT_READ, call)

    def on_writable(self, fd: int, call: Task) -> Registration:
        """As `on_readable`, where `fd` takes bytes. A descriptor has one registration at a time."""
        return self._register(fd, selectors.EVENT_WRITE, call)

    def on_exit(self, pid: int, call: Task) -> Registration:
        """Call `call()` once, when process `pid` has ended."""
        handle = ProcessHandle(pid)

        def ended() -> None:
            registration.cancel()
            call()

        def poll() -> None:
            if registration.active and handle.alive():
                self.call(poll, after_s=PROCESS_POLL_S)
            else:
                registration()

        fd = handle.fileno()
        if fd is not None:
            registration = self._register(fd, selectors.EVENT_READ, ended, handle.close)
        else:
            registration = Registration(ended, handle.close)
            self.call(poll)
        return registration

    def _register(self, fd: int, events: int, call: Task, release: Task = _nothing) -> Registration:
        def forget() -> None:
            # A forked child shares the epoll of its parent, and must not change it.
            if os.getpid() == self._pid and not self._over:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(fd)
            release()

        registration = Registration(call, forget)
        self._selector.register(fd, events, registration)
        return registration

    # on any thread -----------------------------------------------------------------------------------------------

    def call(self, task: Task, *, after_s: float = 0.0) -> None:
        """Run `task` on the loop's thread, `after_s` seconds from now. Does not wait.

        Once the loop has ended, a task that is due runs on the calling thread, and a timer never.
        """
        if after_s > 0.0:
            timer = time.monotonic() + after_s, next(self._numbers), task
            self._tasks.append(lambda: heapq.heappush(self._timers, timer))
        else:
            self._tasks.append(task)
        if self._over:
            self._run_tasks()
        else:
            with contextlib.suppress(OSError, ValueError):  # the loop is ending, and runs what is left
                os.eventfd_write(self._wake, 1)

    def is_current(self) -> bool:
        """Whether this is the loop's own thread."""
        return threading.current_thread() is self._thread

    def alive(self) -> bool:
        """Whether the loop runs, in this process."""
        return self._thread.is_alive() and os.getpid() == self._pid

    def stop(self, timeout_s: float) -> None:
        """End the loop, and wait for that; idempotent."""
        self._stopping = True
        self.call(_nothing)
        if not self.is_current():
            self._thread.join(timeout_s)

    def close(self) -> None:
        """Close the descriptors, and nothing else: a forked child runs this."""
        self._selector.close()
        wake, self._wake = self._wake, -1  # a late `call` must not write to a recycled descriptor
        if wake >= 0:
            os.close(wake)

    # the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, _ in self._selector.select(self._patience()):
                    key.data()
                while self._timers and self._timers[0][0] <= time.monotonic():
                    heapq.heappop(self._timers)[2]()
        except BaseException as error:
            self._failed(error)
            raise
        finally:
            with contextlib.ExitStack() as last_first:  # each of them, whatever the others raise
                last_first.callback(self._run_left)  # those that came while the loop ended
                last_first.callback(self._close_for_good)
                last_first.callback(self._ended)
                last_first.callback(self._run_left)

    def _close_for_good(self) -> None:
        self._over = True
        self.close()

    def _patience(self) -> float | None:
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _reset(self) -> None:
        os.eventfd_read(self._wake)  # before the tasks: one that comes later writes again
        self._run_tasks()

    def _run_left(self) -> None:
        """Run every task, whatever the others raise."""
        try:
            self._run_tasks()
        finally:
            if self._tasks:
                self._run_left()

    def _run_tasks(self) -> None:
        while True:
            try:
                task = self._tasks.popleft()
            except IndexError:
                return
            task()
