"""Virtual time: threads that run one at a time, each at its own clock, and lanes of devices that are clocks.

The thread whose clock is earliest runs, until it sleeps, waits or has spent time; so whatever it reads was written by
threads at earlier times. Real code runs on such threads unchanged where its sleeps are `VirtualTime.sleep` and its
events, semaphores and queues those of `primitives`. Nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

YIELD_S = 1e-6  #: what a yield of the processor takes
HANDOVER_S = 20e-6  #: from the thread that wakes another to that one running
LONGEST_POLL_S = 0.2e-3  #: by which the end of a wait with a limit is seen late, at most


@dataclass
class Actor:
    """One thread. `rank` and `role` are whose it is; `waits` has its longest wait for each thing."""

    rank: int
    role: str
    now: float = 0.0
    turn: threading.Lock = field(default_factory=threading.Lock)
    waits: dict[str, float] = field(default_factory=dict)


class _Over(BaseException):
    """Ends a thread whose simulation is over."""


class VirtualTime:
    """The threads and the time of one simulation. They end with it, wherever they are.

    Attributes:
        failed: what a thread has raised; the simulation ends with it.
    """

    def __init__(self) -> None:
        self._here, self._count = threading.local(), 0
        self._ready: list[tuple[float, int, Actor]] = []
        self._over, self._threads = threading.Event(), list[threading.Thread]()
        self._left = False
        self.actors: list[Actor] = []
        self.failed: BaseException | None = None

    @property
    def me(self) -> Actor:
        found: Actor = self._here.actor
        return found

    def now(self) -> float:
        """Of the thread that asks; 0 outside the simulation."""
        actor = getattr(self._here, "actor", None)
        return 0.0 if actor is None else float(actor.now)

    def start(self, rank: int, role: str, work: Callable[[], object], at: float = 0.0) -> None:
        """Run `work` on a thread from time `at` on."""
        actor = Actor(rank, role, at)
        actor.turn.acquire()
        self.actors.append(actor)
        thread = threading.Thread(target=self._run, args=(actor, work), daemon=True, name=f"{role} {rank}")
        self._threads.append(thread)
        thread.start()
        self._push(actor)

    def _run(self, actor: Actor, work: Callable[[], object]) -> None:
        self._here.actor = actor
        try:
            self._await_turn(actor)
            work()
        except _Over:
            return
        except BaseException as error:
            self.failed = self.failed or error
        self._next()

    def _await_turn(self, actor: Actor) -> None:
        actor.turn.acquire()
        if self._left:
            actor.turn.release()  # whoever catches this waits no more either
            raise _Over

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Let all threads run until `until()`, which is asked whenever one ends, or none can; at most `limit_s` of real
        time. Raises what a thread has raised.
        """
        self._until = until
        self._next()
        finished = self._over.wait(limit_s)
        self._leave()
        if self.failed is not None:
            raise self.failed
        if not finished:
            raise TimeoutError(f"the simulation has not ended in {limit_s:g} s")
        if not until():
            stuck = ", ".join(f"{actor.role} {actor.rank}" for actor in self.actors)
            raise RuntimeError(f"all threads wait for each other: {stuck}")

    def _leave(self) -> None:
        """End all threads, which hold whatever they work on."""
        self._left = True
        for actor in self.actors:
            actor.turn.release() if actor.turn.locked() else None
        for thread in self._threads:
            thread.join(10.0)
        self._until = lambda: True  # a worker's queue keeps this object, which is to keep nothing of the simulation

    def _push(self, actor: Actor) -> None:
        self._count += 1
        heapq.heappush(self._ready, (actor.now, self._count, actor))

    def _next(self) -> None:
        """Wake the earliest thread, or end."""
        if self.failed is not None or not self._ready or self._until():
            self._over.set()
            return
        heapq.heappop(self._ready)[2].turn.release()

    def sleep(self, seconds: float) -> None:
        """Spend time, on a thread of the simulation."""
        actor = self.me
        actor.now += max(seconds, YIELD_S)
        if self._ready and self._ready[0][0] < actor.now:
            self._push(actor)
            self._next()
            self._await_turn(actor)

    def poll(self, ready: Callable[[], bool], limit_s: float) -> bool:
        """Wait until `ready()`, or for `limit_s`: looks again more and more rarely. Returns whether it is."""
        begin = self.now()
        while not ready():
            spent = self.now() - begin
            if spent >= limit_s:
                return False
            self.sleep(min(max(HANDOVER_S, spent / 20), LONGEST_POLL_S, limit_s - spent))
        return True

    def park(self) -> None:
        """Wait until another thread wakes this one, which is then no earlier than it."""
        actor = self.me
        self._next()
        self._await_turn(actor)

    def wake(self, actor: Actor, after: float = HANDOVER_S) -> None:
        """Let a parked thread go on."""
        actor.now = max(actor.now, self.now() + after)
        self._push(actor)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Whatever time passes in the block is waited for `what`."""
        begin, waits = self.me.now, self.me.waits
        try:
            yield
        finally:
            waits[what] = max(waits.get(what, 0.0), self.me.now - begin)

    def primitives(self) -> tuple[SimpleNamespace, SimpleNamespace]:
        """In place of the modules `threading` and `queue`: what `odc.worker` and `odc.hosts.heaps` use of them. A
        thread belongs to the rank of the thread that starts it.
        """
        time = self

        class Event(_Waited):
            def __init__(self) -> None:
                super().__init__(time)
                self._set = False

            def set(self) -> None:
                self._set = True
                self.wake_all()

            def wait(self, timeout: float | None = None) -> bool:
                while not self._set and timeout is None:
                    self.wait_here()
                return self._set or time.poll(lambda: self._set, timeout or 0.0)

        class Condition(_Waited):
            """Needs no lock, as one thread runs at a time: what is between two waits is never interrupted."""

            def __init__(self) -> None:
                super().__init__(time)

            def __enter__(self) -> None:
                return

            def __exit__(self, *error: object) -> None:
                return

            def wait(self, timeout: float | None = None) -> bool:
                self.wait_here()
                return True

            def notify(self) -> None:
                self.wake_all()

        class SimpleQueue(_Waited):
            def __init__(self) -> None:
                super().__init__(time)
                self._items: deque[Any] = deque()

            def __class_getitem__(cls, item: object) -> type:
                return cls

            def put(self, item: Any) -> None:
                self._items.append(item)
                self.wake_all()

            def get(self) -> Any:
                while not self._items:
                    self.wait_here()
                return self._items.popleft()

        class Thread:
            def __init__(
                self, *, target: Callable[..., object], args: tuple[Any, ...], name: str, daemon: bool
            ) -> None:
                self._start = lambda: time.start(time.me.rank, name, lambda: target(*args), time.now())

            def start(self) -> None:
                self._start()

        made = SimpleNamespace(
            Event=Event,
            Condition=Condition,
            Lock=threading.Lock,
            RLock=threading.RLock,
            Thread=Thread,
            current_thread=threading.current_thread,
            excepthook=threading.excepthook,
        )
        return made, SimpleNamespace(SimpleQueue=SimpleQueue)


class _Waited:
    """What threads wait for."""

    def __init__(self, time: VirtualTime) -> None:
        self._time, self._waiters = time, list[Actor]()

    def wait_here(self) -> None:
        self._waiters.append(self._time.me)
        self._time.park()

    def wake_all(self) -> None:
        waiters, self._waiters = self._waiters, []
        for actor in waiters:
            self._time.wake(actor)


class VirtualLanes:
    """`odc.memory.Lanes` of one device in virtual time: each lane is the time at which it has done what was asked.

    Outside every lane a thread is in lane "compute".
    """

    asynchronous = True

    def __init__(self, time: VirtualTime) -> None:
        self._time, self._here = time, threading.local()
        self.free: dict[str, float] = {}

    @property
    def name(self) -> str:
        return getattr(self._here, "name", "compute")

    @contextmanager
    def lane(self, name: str) -> Iterator[None]:
        before, self._here.name = self.name, name
        try:
            yield
        finally:
            self._here.name = before

    def ask(self, seconds: float) -> float:
        """Work of so many seconds in the current lane; returns when it will be over."""
        self.free[self.name] = over = self.mark() + seconds
        return over

    def mark(self) -> float:
        return max(self.free.get(self.name, 0.0), self._time.now())

    def follow(self, mark: object) -> None:
        assert isinstance(mark, float)
        self.free[self.name] = max(self.free.get(self.name, 0.0), mark)

    def settle(self) -> None:
        late = self.free.get(self.name, 0.0) - self._time.now()
        if late > 0:
            self._time.sleep(late)

    def reached(self, mark: object) -> bool:
        assert isinstance(mark, float)
        return self._time.now() >= mark
