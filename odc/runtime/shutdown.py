"""Roots that this rank has shut down, kept readable until no peer needs them (docs/protocol.md, "When a rank leaves").

What a peer has mapped stays valid after that. A thread of its own serves all releases, because a finalizer,
which may run on any thread, must not wait and the daemon's loop must not wait for the job's store.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable

from odc.deadlines import (
    ALIVE_CHECK_S,
    RELEASE_FIRST_CHECK_S,
    RELEASE_JOIN_S,
    RELEASE_LONGEST_CHECK_S,
    STORE_ENDING_S,
    Backoff,
    Deadline,
)
from odc.errors import OdcError, WaitTimeoutError
from odc.protocol.words import Word
from odc.runtime.connect import Rendezvous
from odc.runtime.linking import ExposedHeap, HostConnections
from odc.runtime.service import Service
from odc.worker import Job, in_background

_log = logging.getLogger(__name__)


class HeapRelease:
    """One root that was shut down.

    `dismiss` stops the daemon from serving the root, and then calls what it is given. `hosts` are the members on other
    hosts, and `exposed` is what the network sees, if there is either. Unless it is `needed`, no peer will attach to it
    any more, and none is waited for. `unread` is that of `HostConnections.needed_by`. `forget` drops what else keeps
    memory of the peers.
    """

    def __init__(
        self,
        service: Service,
        rendezvous: Rendezvous,
        dismiss: Callable[[Callable[[], None]], object],
        hosts: HostConnections | None = None,
        exposed: ExposedHeap | None = None,
        needed: bool = True,
        unread: Callable[[], list[int]] = list,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self._service, self._rendezvous = service, rendezvous
        self._ending = Job(lambda: dismiss(self._close))  # once
        self._hosts, self._exposed, self._unread, self._let_go = hosts, exposed, unread, forget
        self._layout = service.layout
        self._members = [member for member in rendezvous.grid.others() if needed and member in rendezvous.grid.local]
        self._remaining = list(self._members)  # that it waits for
        self._settled = False
        self._deadline = Deadline(rendezvous.timeout_s)
        self._late: WaitTimeoutError | None = None
        self.over = threading.Event()

    def check(self) -> bool:
        """Whether no peer needs the root any more. On the thread of releases; may wait for the job's store."""
        if self._ending.over() or self._aborted():
            return True
        try:
            if not self._settled:
                self._rendezvous.settle()
                self._settled = True
            self._members = self._rendezvous.unsettled(self._members)
            self._remaining = self._members or ([] if self._hosts is None else self._hosts.needed_by(self._unread))
            if not self._remaining:
                self._rendezvous.forget()
                return True
        except OdcError:  # no process can attach without the store, and it has gone with its host or does not answer
            self._aborted()  # or the job was, which ends that wait
            self._settled = True  # as far as can be: `give_up` does not ask once more
            return True
        return self._expired()

    def _aborted(self) -> bool:
        """Whether the job was aborted; the reason is then left for peers that have not attached yet."""
        mine = self._layout.mine
        if not (found := mine.board.load(Word.ABORT)):
            return False
        self._rendezvous.report(mine.reason, found - 1)
        return True

    def _expired(self) -> bool:
        peers = [self._layout.peer(member) for member in {*self._remaining, *self._layout.grid.remote}]
        if not self._deadline.passed(sum(peer.board.load(Word.PROGRESS) for peer in peers if peer.attached)):
            return False
        board = self._layout.mine.board
        if not self._members and board.load(Word.DONE) < board.load(Word.PUBLISHED):
            return True  # other hosts may be done with the evaluation long since: one that is not will name this rank
        timeout_s, ranks = self._rendezvous.timeout_s, self._rendezvous.grid.ranks
        late = ", ".join(f"rank {ranks[member]}" for member in self._remaining)
        self._late = WaitTimeoutError(
            f"rank {self._service.rank}, leaving heap {self._service.identity}: {late} has neither attached to all its "
            f"peers nor left for {timeout_s:g} s, and will miss this rank's shards; raise Settings.timeout_s if it is "
            "only slow",
            culprit=ranks[self._remaining[0]],
        )
        _log.warning("%s", self._late)  # for a root that was dropped long before the end, no thread waits
        return True

    def end(self) -> None:
        """Close the heap at once, even if peers still need it. Does not wait."""
        self._ending.run()

    def give_up(self) -> None:
        """As `end`, on the thread of releases, also where the daemon stops. This process may live on, as after an error
        that was caught: peers that have not attached must not wait for it. Waits 2 s at most for the store.
        """
        if not (self._settled or self._ending.over() or self._layout.mine.board.load(Word.ABORT)):
            with contextlib.suppress(OdcError, RuntimeError):  # the latter where no thread can be started
                self._rendezvous.settle(STORE_ENDING_S)
        self.end()

    def _close(self) -> None:
        """On the daemon's thread, which waits for no device: memory is unmapped once that is done with all its work."""
        with contextlib.ExitStack() as last_first:  # each of them, whatever the others raise
            last_first.callback(self._begin_to_give_back)
            last_first.callback(self._rendezvous.close)
            if self._exposed is not None:
                last_first.callback(self._exposed.close)
            if self._hosts is not None:
                last_first.callback(self._hosts.close)

    def _begin_to_give_back(self) -> None:
        if self._layout.heap.lanes.asynchronous:
            with contextlib.suppress(RuntimeError):  # no thread can be started
                in_background("odc-close", self._give_back)
                return
        self._give_back()

    def _give_back(self) -> None:
        try:
            with self._layout.heap.lanes.lane("server"):  # in no capture's way
                self._service.forget()
                self._layout.close()
                self._let_go()
        finally:
            self.over.set()

    def wait(self, serve: Callable[[], None]) -> None:
        """Return once the heap is closed; WaitTimeoutError if a peer was given up, or a device is not done with it.
        `serve` is called now and then until no peer needs it.
        """
        while not self._ending.over(ALIVE_CHECK_S):  # `check` has a deadline
            serve()
        timeout_s = self._rendezvous.timeout_s
        if not self.over.wait(timeout_s):
            raise WaitTimeoutError(
                f"rank {self._service.rank}, leaving heap {self._service.identity}: its device has not ended what it "
                f"was asked for within {timeout_s:g} s, perhaps a collective that a lost rank has not joined"
            )
        if self._late is not None:
            raise self._late


class ReleaseQueue:
    """All heap releases of one daemon, served by a thread that ends with the last one. `add` may be called by a
    finalizer.
    """

    def __init__(self) -> None:
        self._added: list[HeapRelease] = []  # copied by slicing, which a finalizer that appends does not disturb
        self._stopping = False
        self._serving = threading.Lock()  # held by the thread

    def add(self, release: HeapRelease) -> Callable[[], None]:
        """Returns a function that waits for the release, as `HeapRelease.wait` does."""
        self._added.append(release)
        self._start()
        if self._stopping:
            release.end()  # the thread may have ended before
        return functools.partial(release.wait, self._serve_waiting)

    def wait(self) -> None:
        """Return once every release that was added is over. Raises as `HeapRelease.wait` does, for the first."""
        late = None
        for release in self._added[:]:
            try:
                release.wait(self._serve_waiting)
            except WaitTimeoutError as error:
                late = late or error
        if late is not None:
            raise late

    def stop(self) -> None:
        """Close the remaining heaps, even if a peer still needs one."""
        self._stopping = True
        if self._serving.acquire(timeout=RELEASE_JOIN_S):
            self._check_each()  # of those that got no thread

    def _serve_waiting(self) -> None:
        """By a thread that waits for a release, as there may have been no thread to serve it."""
        self._start(self._check_each)

    def _start(self, otherwise: Callable[[], None] = lambda: None) -> None:
        """Start the thread, unless it runs. Where the system starts none now, `otherwise` takes its place."""
        if self._serving.acquire(blocking=False):
            try:
                in_background("odc-releases", self._release)
            except RuntimeError:
                try:
                    otherwise()
                finally:
                    self._serving.release()

    def _release(self) -> None:
        more = True
        while more:
            self._serve()
            self._serving.release()
            # One may have been added that found the lock held.
            more = bool(self._added) and not self._stopping and self._serving.acquire(blocking=False)

    def _serve(self) -> None:
        """Check all releases until none is left. Each as often: peers may shut down in another order."""
        backoff, known = Backoff(RELEASE_FIRST_CHECK_S, RELEASE_LONGEST_CHECK_S), 0
        while self._added:
            if len(self._added) > known:
                backoff.restart()
            self._check_each()
            known = len(self._added)
            if known:
                backoff.sleep()

    def _check_each(self) -> None:
        """Once, under the lock."""
        for release in self._added[:]:
            if self._stopping or _is_over(release):
                release.give_up()
                release.over.wait(RELEASE_FIRST_CHECK_S)
            if release.over.is_set():
                self._added.remove(release)


def _is_over(release: HeapRelease) -> bool:
    """Whether no peer needs the root any more, or that is unknown: this thread must live, or `shutdown` hangs."""
    try:
        return release.check()
    except Exception:
        _log.exception("a root that this rank has shut down is closed, because its peers cannot be asked")
        return True
