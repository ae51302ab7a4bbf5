"""Messages among the processes of one task through the job's key-value store, and the end of all waits when one fails.

The store works beside any backend, needs no further process group, and can be polled, so one member's failure ends
every wait of the others within a fraction of a second. Messages pass through its server in pieces of 256 KiB, at a few
hundred MB/s on one host: right for scores, texts and traces, but not for images.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from odc.deadlines import (
    MAIL_ALONE_S,
    MAIL_FIRST_SLEEP_S,
    MAIL_LONGEST_SLEEP_S,
    MAIL_TICK_S,
    STORE_LEAST_S,
    Backoff,
    Deadline,
    last_in_chain,
)
from odc.errors import PeerLostError, WaitTimeoutError, culprit_of
from odc.net.announced import has_ended
from odc.net.engines.connections import Check, no_check
from odc.net.store import JobStore

_PIECE = 256 << 10  # bytes of one value; TCPStore is slow beyond, and refuses 8 MiB
_AHEAD = 4  # unread pieces between two members
_CHECKS = 20  # of a peer's progress, in one timeout


class Mailbox:
    """One member's messages to and from the others, in order. Use it from one thread.

    `ids` are the members' global ranks, or numbers of hosts, of which error messages speak as `kind`; the other methods
    take members, indices into `ids`, of which `me` is this one's. A wait ends `timeout_s` after the last progress of
    the member it waits for; if that one waits itself, of the end of the chain. `task` names what all do together;
    `prefix` begins its keys in the store.

    Every wait raises PeerLostError once another member has failed, or the process of the rank it waits for, which has
    announced it (`announce_process`), is seen to end; WaitTimeoutError, naming the end of the chain of waits; and as a
    JobStore does. `check`, given what this member does, is called in every wait, also in that for the store, which it
    must not call; it may raise to end the wait.
    """

    def __init__(
        self,
        store: Any,
        ids: Sequence[int],
        me: int,
        timeout_s: float,
        prefix: str = "",
        *,
        kind: str = "rank",
        task: str = "the evaluation",
        check: Check = no_check,
    ) -> None:
        self._of_ranks, self._refuse = kind == "rank", check
        watch = functools.partial(check, "asking the job's store")
        self._job = JobStore(store, max(timeout_s, STORE_LEAST_S), ids[me] if self._of_ranks else None, watch=watch)
        self._store = JobStore(self._job, self._job.timeout_s, self._job.rank, prefix, watch)
        self.ids, self.me, self.timeout_s = tuple(ids), me, timeout_s
        self._kind, self._task, self._names = kind, task, [f"{kind} {one}" for one in ids]
        self._sent, self._received = [0] * len(ids), [0] * len(ids)
        self._met, self._ticked = 0, float("-inf")
        self._first_s = 0.0  # the least deadline of a wait for the first member

    @property
    def world(self) -> int:
        """How many members there are."""
        return len(self.ids)

    def tick(self) -> None:
        """Report progress; raises PeerLostError if another member failed. Checks at most five times a second.

        A session calls it before each forward of its modules; call it in a long computation without forwards.
        """
        now = time.monotonic()
        if now - self._ticked >= min(MAIL_TICK_S, self.timeout_s / _CHECKS):
            self._ticked = now
            self._store.add(f"steps/{self.me}", 1)
            self.check("computing")

    def let_first_work(self) -> None:
        """Give the first member, which now works alone, a day without progress until it sends something or meets."""
        self._first_s = MAIL_ALONE_S

    def check(self, doing: str) -> None:
        """Raise PeerLostError if a member has failed; `doing` is what this one was doing."""
        failed = self.failed()
        if failed is not None:
            culprit, reason = failed
            raise PeerLostError(
                f"{self._names[self.me]}, {doing}: {self._kind} {culprit} failed in {self._task}: {reason}",
                culprit=culprit if self._of_ranks else None,
            )

    def failed(self) -> tuple[int, str] | None:
        """Which of `ids` failed first, and why; None if none has."""
        found = self._store.find("failed")
        return None if found is None else _decoded(found)

    def fail(self, error: BaseException) -> tuple[int, str]:
        """End every wait of the other members and blame this one, or the rank that `error` blames.

        Of several failures the first counts, which it returns as `failed` does. Waits for the store 5 s at most.
        """
        mine = self.ids[self.me]
        culprit = culprit_of(error, mine) if self._of_ranks else mine
        # In one call: of two a busy machine may let only the first be made in time, and no member would learn of it.
        store, failure = self._store.within(STORE_LEAST_S), json.dumps([culprit, f"{type(error).__name__}: {error}"])
        return _decoded(store.compare_set("failed", "", failure))

    def meet(self, what: str) -> None:
        """Wait until every member has called it; `what` names the wait in messages."""
        self._arrive(what)
        if self.me:
            self._wait(lambda: self._store.add("released", 0) >= self._met, 0, what)
            self._first_s = 0.0
        else:
            self._store.add("released", 1)

    def _arrive(self, what: str, over: bool = False) -> None:
        """Count this member in at the next rendezvous; the first member waits for all others to arrive. `over`: all
        have met for the last time, so the end of one that has left is no loss.
        """
        self._met += 1
        self._store.add(f"met/{self.me}", 1)
        for member in range(1, 1 if self.me else self.world):
            self._wait(lambda m=member: self._store.add(f"met/{m}", 0) >= self._met, member, what, over=over)  # type: ignore[misc]

    def leave(self, what: str) -> None:
        """The last rendezvous, called by every member. Afterwards the store holds nothing of this task."""
        self.meet(what)
        # The store's server may live in the first member's process, which stays until no other needs it any more.
        self._arrive(what, over=True)
        if self.me:
            return
        names = [f"{kind}/{member}" for kind in ("met", "steps", "waits") for member in range(self.world)]
        for name in [*names, "released"]:
            self._store.delete_key(name)

    def send(self, member: int, message: bytes, what: str) -> None:
        """Send `member` a message; waits while it has not read the last megabyte before it."""
        for at in range(0, max(len(message), 1), _PIECE):
            number, more = self._sent[member], at + _PIECE < len(message)
            if number >= _AHEAD:
                old = f"data/{self.me}-{member}/{number - _AHEAD}"
                self._wait(lambda old=old: not self._store.check([old]), member, f"to take {what}")  # type: ignore[misc]
            piece = (b"+" if more else b".") + message[at : at + _PIECE]
            self._store.set(f"data/{self.me}-{member}/{number}", piece)
            self._sent[member] += 1

    def receive(self, member: int, what: str, timeout_s: float | None = None) -> bytes:
        """Wait for the next message of `member`; `what` names its content in error messages.

        `timeout_s` takes the place of the mailbox's own. Reading counts as progress of this member.
        """
        message = bytearray()
        while True:
            key = f"data/{member}-{self.me}/{self._received[member]}"
            self._wait(lambda key=key: self._store.check([key]), member, what, timeout_s)  # type: ignore[misc]
            piece = self._store.get(key)
            self._store.delete_key(key)
            self._received[member] += 1
            message += memoryview(piece)[1:]
            self.tick()
            if piece[:1] == b".":
                self._first_s = self._first_s if member else 0.0
                return bytes(message)

    def _wait(
        self, ready: Callable[[], bool], member: int, what: str, timeout_s: float | None = None, over: bool = False
    ) -> None:
        """Poll until `ready()`, which `member` makes true. Progress at the end of its chain of waits starts the
        deadline anew; waiting itself is none, or members that wait for each other would do so for ever.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        limit_s = limit_s if member else max(limit_s, self._first_s)
        backoff, deadline = Backoff(MAIL_FIRST_SLEEP_S, MAIL_LONGEST_SLEEP_S), Deadline(limit_s)
        check_s = min(limit_s, self.timeout_s) / _CHECKS
        next_check, next_look = Deadline(check_s), Deadline(MAIL_TICK_S)
        published = False
        while not ready():
            self.check(f"waiting for {what}")
            if not over:
                self._refuse(f"waiting for {what}")
            backoff.sleep()
            if next_look.passed():
                next_look = Deadline(MAIL_TICK_S)
                if self._ended(member) and not ready():
                    text = f"{self._names[self.me]}, waiting for {what}: the process of {self._names[member]} has ended"
                    raise PeerLostError(text, culprit=self.ids[member])
            if not next_check.passed():
                continue
            next_check = Deadline(check_s)
            if not published:
                self._store.set(f"waits/{self.me}", str(member))
                published = True
            end = last_in_chain(member, self.me, self._waits_for)
            if deadline.passed((end, self._store.add(f"steps/{end}", 0))):
                self._run_out(member, end, what, limit_s)
        if published:
            self._store.set(f"waits/{self.me}", str(self.me))  # for no other; a key that is read is never deleted
        self._ticked = float("-inf")  # the next tick() counts at once

    def _ended(self, member: int) -> bool:
        """Whether the member's process is seen to have ended; what it stored before is in the store."""
        return self._of_ranks and has_ended(self._job, self.ids[member])

    def _run_out(self, member: int, culprit: int, what: str, timeout_s: float) -> NoReturn:
        chain = f"; it waits for {self._names[culprit]} itself" if culprit != member else ""
        raise WaitTimeoutError(
            f"{self._names[self.me]}, waiting for {what}: {self._names[member]} has made no progress for "
            f"{timeout_s:g} s{chain}; raise timeout_s if it is only slow",
            culprit=self.ids[culprit] if self._of_ranks else None,
        )

    def _waits_for(self, member: int) -> int | None:
        key = f"waits/{member}"
        return int(self._store.get(key)) if self._store.check([key]) else None


def _decoded(failure: bytes) -> tuple[int, str]:
    culprit, reason = json.loads(failure)
    return int(culprit), str(reason)
