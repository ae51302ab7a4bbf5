"""Threads, the jobs of workers, and those locks of a process that keep two threads from the same memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from recorded.notes import ACQUIRE, DROPPED, OBJECT, RELEASE, THREAD, library, name, note, number, wrapped


def threads() -> None:
    """What a thread begins with is what the one that starts it knew; who joins it learns what it knew at its end."""

    def start(real: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any) -> None:
            note(RELEASE, number(self), 0, OBJECT)
            real(self)

        return run

    def body(real: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any) -> None:
            library().emulated_is_python_thread()
            note(ACQUIRE, number(self), 0, OBJECT)
            note(THREAD, name(self.name))
            try:
                real(self)
            finally:
                note(RELEASE, number(self, "recorded_end"), 0, OBJECT)

        return run

    def join(real: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, timeout: float | None = None) -> None:
            real(self, timeout)
            if not self.is_alive():
                note(ACQUIRE, number(self, "recorded_end"), 0, OBJECT)

        return run

    wrapped(threading.Thread, "start", start)
    wrapped(threading.Thread, "run", body)
    wrapped(threading.Thread, "join", join)


def worker(module: ModuleType) -> None:
    """Jobs, from the thread that submits one to the thread that does it, and from there to those that wait for it."""

    def submit(real: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, job: Any) -> None:
            note(RELEASE, number(job), 0, OBJECT)
            real(self, job)

        return run

    def perform(real: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any) -> None:
            work = self._work
            if work is not None:

                def noted() -> Any:
                    note(ACQUIRE, number(self), 0, OBJECT)
                    try:
                        return work()
                    finally:
                        note(RELEASE, number(self, "recorded_end"), 0, OBJECT)
                        note(RELEASE, DROPPED, 0, OBJECT)

                self._work = noted
            real(self)

        return run

    def over(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any) -> Any:
            try:
                return real(self, *args)
            finally:
                if self._done.is_set():
                    note(ACQUIRE, number(self, "recorded_end"), 0, OBJECT)

        return run

    wrapped(module.Worker, "submit", submit)
    wrapped(module.Job, "run", perform)
    for method in ("cancel", "over", "wait"):
        wrapped(module.Job, method, over)


class _NotedLock:
    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.acquire()
        note(ACQUIRE, number(self), 0, OBJECT)

    def __exit__(self, *_: object) -> None:
        note(RELEASE, number(self), 0, OBJECT)
        self._lock.release()


def locks(**attributes: str) -> Callable[[ModuleType], None]:
    """Locks of this process that keep two threads from the same memory: the attribute that holds one, by its class."""

    def wrap(module: ModuleType) -> None:
        for owner, attribute in attributes.items():

            def init(real: Callable[..., None], attribute: str = attribute) -> Callable[..., None]:
                def run(self: Any, *args: Any, **named: Any) -> None:
                    real(self, *args, **named)
                    setattr(self, attribute, _NotedLock(getattr(self, attribute)))

                return run

            wrapped(vars(module)[owner], "__init__", init)

    return wrap
