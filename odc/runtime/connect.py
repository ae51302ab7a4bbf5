"""Finding a peer's heap: its announcement in the job's store, then its descriptor through the peer's listener.

The announcement carries what the layouts must agree on, so both sides can name a mismatch even if one has ended. A rank
whose job was aborted leaves the reason in the store, so that one that attaches too late blames the culprit.

Keys of a root `I` in the store, all under `odc/I`: `R` (the announcement of rank R), `R/lines`, `R/settled`,
`R/aborted` and `released`. The last member to shut down deletes them. `odc/roots/M/R` lists the roots that rank R has
on the ranks M, with the calls of `fully_shard` in each.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from odc.deadlines import (
    ATTACH_CHECK_S,
    STORE_ENDING_S,
    STORE_LEAST_S,
    STORE_LONGEST_POLL_S,
    STORE_POLL_S,
    Backoff,
    Deadline,
)
from odc.errors import (
    LayoutMismatchError,
    OdcError,
    PeerLostError,
    UnsupportedError,
    WaitTimeoutError,
    aborted_by,
    culprit_of,
)
from odc.memory import Attachment
from odc.net.announced import failure, has_ended, host_identity, refuse_failure
from odc.net.requests import Answer, NoAnswerError, ask
from odc.net.store import JobStore
from odc.protocol.grid import RankGrid
from odc.protocol.units import UnitSpec

_KEYS = ("", "/lines", "/settled", "/aborted")  # of each member

_listing = threading.Lock()  # of this process's roots in the store


def _nothing(*unused: object) -> None:
    return


def _look(rendezvous: weakref.ref[Rendezvous]) -> None:
    found = rendezvous()
    if found is not None:
        found.check("asking the job's store")


def _left(doing: str) -> None:
    raise OdcError(f"this root has left the job ({doing})")


def ask_member(
    address: str,
    request: dict[str, Any],
    timeout_s: float,
    who: str,
    rank: int,
    check: Callable[[str], None] = _nothing,
    hint: str = "",
) -> Answer:
    """Ask the listener of `rank` (global) at `address`, for as long as the rank lives.

    `who` begins every message, and `hint` ends the one for a process that does not listen. `check` is called once a
    second and may end the wait. Raises WaitTimeoutError without an answer within `timeout_s`, PeerLostError if no
    process listens.
    """
    deadline, doing = Deadline(timeout_s), f"attaching to rank {rank}"
    backoff = Backoff(STORE_POLL_S, STORE_LONGEST_POLL_S)
    while True:
        try:
            return ask(address, request, min(timeout_s, ATTACH_CHECK_S))
        except (TimeoutError, NoAnswerError) as error:  # it lives: stopped, or holding on to its interpreter lock
            check(doing)
            if deadline.passed():
                late = f"{who}, {doing}: its server has not answered for {timeout_s:g} s"
                raise WaitTimeoutError(late, culprit=rank) from error
            backoff.sleep()
        except OSError as error:
            gone = f"{who}, {doing}: its server does not answer ({error}){hint}"
            raise PeerLostError(gone, culprit=rank) from error


@dataclass(frozen=True)
class RootEvents:
    """What a rendezvous asks of its root and reports to it, on any thread.

    `check(doing)` raises if the job was aborted; `attached(member, pid)` comes once for each member, after its heap's
    descriptor; `failed(reason, culprit)` aborts the peers attached so far.
    """

    check: Callable[[str], None] = _nothing
    attached: Callable[[int, int], None] = _nothing
    failed: Callable[[str, int], None] = _nothing


class Rendezvous:
    """Attaches one root to its peers. `connect` may be called from any thread.

    `identity` is of the root's heap, the same on every rank. A peer may take `timeout_s` to come up, and the store to
    answer (5 s at least). No call of the store holds a thread up once the job was aborted.
    """

    def __init__(self, store: Any, identity: str, grid: RankGrid, timeout_s: float, events: RootEvents) -> None:
        self._identity, self.grid, self.timeout_s = identity, grid, timeout_s
        self._events = events
        # Weak, or the store's watch would keep this object, and it the heap, alive in a cycle.
        me = weakref.ref(self)
        self._store = JobStore(store, max(timeout_s, STORE_LEAST_S), grid.rank, watch=lambda: _look(me))
        self.doorbells: dict[int, int] = {}  # member -> eventfd of its daemon
        self._notifying = threading.Lock()  # a doorbell is not closed while it is written to
        self._attached: set[int] = set()
        self._own: dict[str, Any] = {}
        self._lines: list[list[str]] = []
        self._calls: frozenset[int] = frozenset()

    def check(self, doing: str) -> None:
        """Raise if the job was aborted in the meantime, or this root has left it."""
        self._events.check(doing)

    def announce(
        self,
        address: str,
        token: str,
        digest: str,
        units: Sequence[UnitSpec],
        settings: str = "",
        calls: Sequence[int] = (),
    ) -> None:
        """Publish where this rank's listener is, the token to show there, and what must agree.

        `settings` is their fingerprint. `calls` are the numbers of the calls of `fully_shard` that made the root's
        tree: two ranks whose trees share a call have the same tree, or it is a mismatch.
        """
        # Enough to name the first unit in which two ranks differ.
        short = [[unit.name, hashlib.sha256(unit.fingerprint().encode()).hexdigest()[:8]] for unit in units]
        self._own = {"address": address, "token": token, "digest": digest, "units": short, "settings": settings}
        self._own["host"] = host_identity()
        self._lines = lines = [unit.lines() for unit in units]
        # Read only by a rank whose layout differs. Packed, because a model of many experts has many lines, and a store
        # takes no value of any size.
        packed = base64.b64encode(zlib.compress(json.dumps(lines).encode())).decode()
        self._store.set(self._key(self.grid.me) + "/lines", packed)
        self._store.set(self._key(self.grid.me), json.dumps(self._own))
        self._calls = frozenset(calls)
        if calls:
            self._list(self.grid.rank, sorted(calls))

    def _list(self, rank: int, calls: list[int] | None) -> None:
        """List this root, with its calls, among this rank's roots; with None no longer."""
        with _listing:
            listed = self._listed(rank)
            listed.pop(self._identity, None)
            if calls is not None:
                listed[self._identity] = calls
            self._store.set(self._roots_key(rank), json.dumps(listed))

    def _listed(self, rank: int) -> dict[str, list[int]]:
        listed: dict[str, list[int]] = json.loads(self._store.find(self._roots_key(rank)) or "{}")
        return listed

    def _roots_key(self, rank: int) -> str:
        return f"odc/roots/{self._identity.partition('.')[2]}/{rank}"

    def _key(self, member: int) -> str:
        return f"odc/{self._identity}/{self.grid.ranks[member]}"

    def connect(self, member: int) -> Attachment:
        """Wait for the member's heap and return its descriptor.

        Raises WaitTimeoutError if it did not come up in time, LayoutMismatchError if its heap is laid out otherwise,
        PeerLostError if it is gone.
        """
        try:
            found = self._connect(member)
        except OdcError as error:
            reported = self._reported(member) if isinstance(error, PeerLostError) else None
            failure = reported or error
            self._events.failed(str(failure), culprit_of(failure, self.grid.rank))
            if reported is not None:
                raise reported from error
            raise
        self._attached.add(member)
        if self._attached.issuperset(peer for peer in self.grid.local_shard_group if peer != self.grid.me):
            with contextlib.suppress(OdcError):  # only a rank that shuts down reads it
                self.settle()
        return found

    def announced(self, member: int) -> dict[str, Any]:
        """What the member has published by `announce`; waits for it like `connect`, with the same errors."""
        late = (
            f"it has not created heap {self._identity} in {self.timeout_s:g} s; every rank of the mesh must shard the "
            "same modules and run them, or enter `with model.minibatch()` if it has no data"
        )
        found: dict[str, Any] = json.loads(self._await_key(self._key(member), member, "come up", late))
        return found

    def agreed(self, member: int) -> dict[str, Any]:
        """As `announced`; LayoutMismatchError if the member's heap is laid out otherwise than this rank's."""
        found = self.announced(member)
        if found["digest"] != self._own["digest"]:
            raise LayoutMismatchError(self._difference(found, self.grid.ranks[member], self._identity))
        return found

    def _refuse_other_host(self, found: dict[str, Any], rank: int) -> None:
        if found.get("host") != self._own["host"]:
            raise UnsupportedError(
                f"rank {self.grid.rank} and rank {rank} are on different hosts, or in containers that do not share "
                f"their network and PID namespaces; heap {self._identity} is shared within one host only"
            )

    def report(self, reason: str, culprit: int) -> None:
        """Leave why the job was aborted for peers that have not attached yet. Never raises, waits 2 s at most."""
        with contextlib.suppress(OdcError):  # the store may have gone with the culprit
            self._store.within(STORE_ENDING_S).set(self._key(self.grid.me) + "/aborted", json.dumps([culprit, reason]))

    def refuse_failed(self, doing: str) -> None:
        """Raise PeerLostError if a rank has left in the store why it ended; not if the store does not answer."""
        left = None
        with contextlib.suppress(OdcError):
            left = failure(self._store.within(STORE_ENDING_S))
        if left is not None:
            raise aborted_by(f"rank {self.grid.rank}, {doing}", *left)

    def _reported(self, member: int) -> PeerLostError | None:
        """What the member left by `report`, or any rank as it ended, as an error."""
        store = self._store.within(STORE_ENDING_S)
        try:
            found = store.find(self._key(member) + "/aborted")
            left = failure(store) if found is None else json.loads(found)
        except OdcError:
            return None
        doing = f"rank {self.grid.rank}, attaching to rank {self.grid.ranks[member]}"
        return None if left is None else aborted_by(doing, *left)

    def _connect(self, member: int) -> Attachment:
        rank, me = self.grid.ranks[member], self.grid.rank
        found = self.agreed(member)
        self._refuse_other_host(found, rank)
        request = {"op": "attach", "root": self._identity, "token": found["token"]}
        answer = ask_member(found["address"], request, self.timeout_s, f"rank {me}", rank, self.check)
        if "error" in answer.reply:
            for fd in answer.fds:
                os.close(fd)
            raise PeerLostError(f"rank {me}, attaching to rank {rank}: {answer.reply['error']}", culprit=rank)
        descriptor, self.doorbells[member], *others = answer.fds
        self._events.attached(member, answer.pid)
        return Attachment(descriptor, int(answer.reply["nbytes"]), str(answer.reply["digest"]), tuple(others))

    def _await_key(self, key: str, member: int, what: str, late: str) -> bytes:
        """The value of `key` once the member has set it; it does `what` first; `late` is the deadline's error."""
        rank, doing = self.grid.ranks[member], f"waiting for rank {self.grid.ranks[member]} to {what}"
        here = f"rank {self.grid.rank}, {doing}"

        def check() -> None:
            self.check(doing)
            self._refuse_other_root(rank)  # first: each rank names the difference as it sees it
            refuse_failure(self._store, here)
            if has_ended(self._store, rank) and not self._store.check([key]):
                ended = f"the process of rank {rank} ended before its first minibatch; its output says why"
                raise PeerLostError(f"{here}: {ended}", culprit=rank)

        return self._store.await_key(key, f"{here}: {late}", culprit=rank, check=check, timeout_s=self.timeout_s)

    def _refuse_other_root(self, rank: int) -> None:
        """Raise if `rank` has made another root of a call of `fully_shard` that belongs to this one here."""
        for identity, calls in self._listed(rank).items() if self._calls else ():
            if identity != self._identity and self._calls.intersection(calls):
                found = self._store.find(f"odc/{identity}/{rank}")
                if found is not None:  # else all its ranks have shut it down by now
                    raise LayoutMismatchError(self._difference(json.loads(found), rank, identity))

    def _difference(self, found: dict[str, Any], rank: int, identity: str) -> str:
        me = self.grid.rank
        text = f"rank {me} and rank {rank} laid out heap {self._identity} differently: "
        mine, theirs = self._own["units"], found["units"]
        if identity == self._identity and self._own["settings"] != found.get("settings"):
            return text + f"rank {me} has settings {self._own['settings']}, rank {rank} has {found.get('settings')}"
        if len(mine) != len(theirs):
            return text + f"rank {me} has {len(mine)} units, rank {rank} has {len(theirs)}"
        for i, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            if one != other:
                text += f"the first unit to differ is {one[0]!r} on rank {me} and {other[0]!r} on rank {rank}"
                return text + self._first_lines(i, f"odc/{identity}/{rank}", rank)
        if identity != self._identity:
            return text + f"rank {rank} has called fully_shard on other modules before, and rank {me} has not"
        return text + "settings or mesh differ"

    def _first_lines(self, unit: int, key: str, rank: int) -> str:
        """The first line in which a unit differs from the peer's, if both have announced their lines."""
        packed = self._store.find(key + "/lines")
        lines: list[list[str]] = json.loads(zlib.decompress(base64.b64decode(packed))) if packed else []
        if not lines or not self._lines:
            return ""
        pairs = itertools.zip_longest(self._lines[unit], lines[unit], fillvalue="nothing")
        mine, theirs = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
        return f": rank {self.grid.rank} has {mine}, rank {rank} has {theirs}" if mine else ""

    def notify(self, member: int) -> None:
        """Wake the daemon of a member that was attached before; OdcError if this root has left the job."""
        with self._notifying:
            doorbell = self.doorbells.get(member)
            if doorbell is None:
                _left(f"waking rank {self.grid.ranks[member]}")
            else:
                os.eventfd_write(doorbell, 1)

    # shutting down -----------------------------------------------------------------------------------------------

    def settle(self, within_s: float | None = None) -> None:
        """Announce that this rank will attach to no other member of its shard group: it has attached to all, or shuts
        down. Waits for the store, for `within_s` if given.

        It attaches to replicas only when it is done with a minibatch, before whose end no member shuts down.
        """
        store = self._store if within_s is None else self._store.within(within_s)
        store.set(self._key(self.grid.me) + "/settled", "1")

    def unsettled(self, members: Sequence[int]) -> list[int]:
        """Those of `members` that may still attach to this rank: they live, and have neither settled nor aborted."""
        if not members or self._store.check([self._key(member) + "/settled" for member in members]):
            return []
        return [member for member in members if self._may_attach(member)]

    def _may_attach(self, member: int) -> bool:
        if any(self._store.check([self._key(member) + kind]) for kind in ("/settled", "/aborted")):
            return False
        return not has_ended(self._store, self.grid.ranks[member])

    def forget(self) -> None:
        """Take this root out of the store. Every member calls it once, when all have settled; the last deletes."""
        if self._calls:
            self._list(self.grid.rank, None)
        released = f"odc/{self._identity}/released"
        if self._store.add(released, 1) < len(self.grid.ranks):
            return
        for member in self.grid.members:
            for kind in _KEYS:
                self._store.delete_key(self._key(member) + kind)
        self._store.delete_key(released)

    def close(self) -> None:
        """Give the peers' doorbells back, and drop the callbacks: the heap holds this object, and they the heap."""
        with self._notifying:
            for fd in self.doorbells.values():
                os.close(fd)
            self.doorbells.clear()
        self._events = RootEvents(check=_left)
