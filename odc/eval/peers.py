"""The ranks of one evaluation, and the messages they exchange through the job's key-value store.

The store works beside any backend, needs no further process group, and can be polled, so one rank's failure ends every
wait of the others within a fraction of a second. Messages pass through its server in pieces of 256 KiB, at a few
hundred MB/s on one host: right for scores and texts, but not for images. "Members" are indices into the session's
ranks; member 0 coordinates. Messages name global ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from odc.deadlines import Backoff, Deadline
from odc.errors import PeerLostError, ResultsError, WaitTimeoutError
from odc.eval import plain_json
from odc.net import JobStore
from odc.protocol import last_in_chain

_PIECE = 256 << 10  # bytes of one value; TCPStore is slow beyond, and refuses 8 MiB
_AHEAD = 4  # unread pieces between two members
_FIRST_SLEEP_S, _LONGEST_SLEEP_S = 2e-4, 2e-2
_TICK_S = 0.2
_STORE_S = 5.0  # that the store is given in any case: it serves all ranks of the job
_LOOKS = 20  # at a peer's progress, in one timeout


class Peers:
    """The members of a session, as one of them sees the others. Use it from one thread.

    `me` is this rank's index in `ranks`, the members' global ranks; `timeout_s` is how long to wait for a member that
    makes no progress; `prefix` begins this session's keys in the store.
    """

    def __init__(self, store: Any, ranks: Sequence[int], me: int, timeout_s: float, prefix: str = "") -> None:
        self._store = JobStore(store, max(timeout_s, _STORE_S), ranks[me], prefix)
        self.ranks, self.me, self.timeout_s = tuple(ranks), me, timeout_s
        self._sent, self._received = [0] * len(ranks), [0] * len(ranks)
        self._met, self._ticked = 0, float("-inf")

    @property
    def rank(self) -> int:
        return self.ranks[self.me]

    @property
    def world(self) -> int:
        return len(self.ranks)

    def tick(self) -> None:
        """Report progress of this rank; raises PeerLostError if another failed. Looks at most five times a second.

        A session calls it before each forward of its modules; call it in a long computation without forwards.
        """
        now = time.monotonic()
        if now - self._ticked >= min(_TICK_S, self.timeout_s / _LOOKS):
            self._ticked = now
            self._store.add(f"steps/{self.me}", 1)
            self.check("computing")

    def check(self, doing: str) -> None:
        """Raise PeerLostError if a rank has failed; `doing` says what this rank was doing."""
        failed = self.failed()
        if failed is not None:
            culprit, reason = failed
            raise PeerLostError(
                f"rank {self.rank}, {doing}: rank {culprit} failed in the evaluation: {reason}", culprit=culprit
            )

    def failed(self) -> tuple[int, str] | None:
        """The first rank that failed, and why; None if none has."""
        if not self._store.check(["failed"]):
            return None
        culprit, reason = json.loads(self._store.get("failed"))
        return int(culprit), str(reason)

    def fail(self, error: BaseException) -> None:
        """End every wait of the other ranks and blame this rank. Of several failures the first counts."""
        if self._store.add("failures", 1) == 1:
            culprit = getattr(error, "culprit", None)
            whom = self.rank if culprit is None else culprit
            self._store.set("failed", json.dumps([whom, f"{type(error).__name__}: {error}"]))

    def meet(self, what: str) -> None:
        """Wait until every member has called it; `what` says where they meet, for messages."""
        self._arrive(what)
        if self.me:
            self._wait(lambda: self._store.add("released", 0) >= self._met, 0, what)
        else:
            self._store.add("released", 1)

    def _arrive(self, what: str) -> None:
        """Count this member in at the next meeting; the first member waits for all others to arrive."""
        self._met += 1
        self._store.add(f"met/{self.me}", 1)
        for member in range(1, 1 if self.me else self.world):
            self._wait(lambda m=member: self._store.add(f"met/{m}", 0) >= self._met, member, what)  # type: ignore[misc]

    def leave(self, what: str) -> None:
        """The last meeting, called by every member. Afterwards the store holds nothing of this session."""
        self.meet(what)
        # The store's server may live in the first member's process, which stays until nobody needs it any more.
        self._arrive(what)
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

    def receive(self, member: int, what: str) -> bytes:
        """Wait for the next message of `member`; `what` says what it holds, for error messages."""
        message = bytearray()
        while True:
            key = f"data/{member}-{self.me}/{self._received[member]}"
            self._wait(lambda key=key: self._store.check([key]), member, what)  # type: ignore[misc]
            piece = self._store.get(key)
            self._store.delete_key(key)
            self._received[member] += 1
            message += memoryview(piece)[1:]
            if piece[:1] == b".":
                return bytes(message)

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Every member's `value`, by member, called by every member. For small plain values (see `gather_results`)."""
        own = plain_json.dumps(value, f"rank {self.rank}: {what}")
        if self.me:
            self.send(0, own, what)
            everyone: list[Any] = plain_json.loads(self.receive(0, what), what)
            if type(everyone) is not list or len(everyone) != self.world:
                raise ResultsError(f"rank {self.rank}: {what} cannot be read: not one value of each rank")
            return everyone
        others = [plain_json.loads(self.receive(member, what), what) for member in range(1, self.world)]
        everyone = [plain_json.loads(own, what), *others]  # decoded, so that the values equal those of the other ranks
        message = plain_json.dumps(everyone, what)
        for member in range(1, self.world):
            self.send(member, message, what)
        return everyone

    def _wait(self, ready: Callable[[], bool], member: int, what: str) -> None:
        """Poll until `ready()`, which `member` makes true. Its progress starts the deadline anew."""
        backoff, deadline = Backoff(_FIRST_SLEEP_S, _LONGEST_SLEEP_S), Deadline(self.timeout_s)
        next_look = Deadline(self.timeout_s / _LOOKS)
        told, seen = False, -1
        while not ready():
            self.check(f"waiting for {what}")
            backoff.sleep()
            if not next_look.passed():
                continue
            next_look = Deadline(self.timeout_s / _LOOKS)
            if not told:
                self._store.set(f"waits/{self.me}", str(member))
                told = True
            before, seen = seen, self._store.add(f"steps/{member}", 0)
            if deadline.passed(seen):
                self._run_out(member, what)
            if seen != before:
                self._store.add(f"steps/{self.me}", 1)  # who waits for this rank waits for that progress
        if told:
            self._store.set(f"waits/{self.me}", str(self.me))  # for nobody; a key that is read is never deleted
        self._ticked = float("-inf")  # the next tick() counts at once

    def _run_out(self, member: int, what: str) -> NoReturn:
        culprit = last_in_chain(member, self.me, self._waits_for)
        chain = f"; it waits for rank {self.ranks[culprit]} itself" if culprit != member else ""
        raise WaitTimeoutError(
            f"rank {self.rank}, waiting for {what}: rank {self.ranks[member]} has made no progress for "
            f"{self.timeout_s:g} s{chain}; raise timeout_s if it is only slow",
            culprit=self.ranks[culprit],
        )

    def _waits_for(self, member: int) -> int | None:
        key = f"waits/{member}"
        return int(self._store.get(key)) if self._store.check([key]) else None
