"""Finding a peer's heap: announcement in the job's store, descriptor through the peer's door.

Chose the key-value store that the mesh was built with (get and set of own keys; no barrier, no collective) over a
gathering of addresses: a rank attaches to a peer when it first needs it, and a subgroup never needs the world. The
announcement carries what the layouts must agree on, so that a mismatch is told on both sides even if one has gone. For
the same reason a rank whose job was aborted leaves the reason in the store: who comes too late to attach blames the
culprit, and not the messenger.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from odc.comm import Geometry, UnitSpec
from odc.errors import LayoutMismatchError, OdcError, PeerLostError, WaitTimeoutError
from odc.memory import Attachment
from odc.server.door import Answer, knock
from odc.server.presence import Store, process_of

_POLL_S = 0.002
_KNOCK_S = 1.0  # between two looks at ABORT


def summary(units: list[UnitSpec] | tuple[UnitSpec, ...]) -> list[list[str]]:
    """[[unit name, short hash], ...]: enough to name the first unit in which two ranks differ."""
    return [[unit.name, hashlib.sha256(unit.fingerprint().encode()).hexdigest()[:8]] for unit in units]


def _ignore(member: int, pid: int) -> None:
    return


def _nobody(reason: str, culprit: int) -> None:
    return


def _left(doing: str) -> None:
    raise OdcError(f"this root has left the job ({doing})")


class Rendezvous:
    """Attaches one root to its peers. `connect` may be called from any thread.

    Args:
        store: of the job.
        identity: of the root's heap, the same on every rank.
        geometry: who stands where.
        timeout_s: how long a peer may take to come up.
        aborted: raises if the job was aborted in the meantime.
    """

    def __init__(
        self, store: Store, identity: str, geometry: Geometry, timeout_s: float, aborted: Callable[[str], None]
    ) -> None:
        self._store, self._identity, self._geometry = store, identity, geometry
        self._timeout_s, self._aborted = timeout_s, aborted
        self.bells: dict[int, int] = {}  # member -> eventfd of its daemon
        self.on_attach: Callable[[int, int], None] = _ignore  # member, pid
        self.on_failure: Callable[[str, int], None] = _nobody  # reason, culprit: tells the peers attached so far
        self._own: dict[str, Any] = {}
        self._lines: Sequence[Sequence[str]] = ()

    def announce(
        self,
        door: str,
        token: str,
        digest: str,
        units: list[list[str]],
        settings: str = "",
        lines: Sequence[Sequence[str]] = (),
    ) -> None:
        """Tell the peers where to knock, and what must agree: layout digest, `summary` of the units, settings.

        `lines` of each unit (`UnitSpec.lines`) are read only by a rank whose layout is another.
        """
        self._own = {"door": door, "token": token, "digest": digest, "units": units, "settings": settings}
        self._lines = lines
        # One line a parameter: packed, or a model of many experts would pass the most that a store takes.
        packed = base64.b64encode(zlib.compress(json.dumps(lines).encode())).decode()
        self._store.set(self._key(self._geometry.me) + "/lines", packed)
        self._store.set(self._key(self._geometry.me), json.dumps(self._own))

    def _key(self, member: int) -> str:
        return f"odc/{self._identity}/{self._geometry.ranks[member]}"

    def connect(self, member: int) -> Attachment:
        """Wait for the member's heap and return its descriptor.

        Raises:
            WaitTimeoutError: it did not come up in time.
            LayoutMismatchError: its heap is laid out otherwise.
            PeerLostError: it is gone.
        """
        try:
            return self._connect(member)
        except OdcError as error:
            told = self._told(member) if isinstance(error, PeerLostError) else None
            failure = told or error
            self.on_failure(str(failure), self._geometry.ranks[member] if failure.culprit is None else failure.culprit)
            if told is not None:
                raise told from error
            raise

    def announced(self, member: int) -> dict[str, Any]:
        """What the member has said by `announce`; waits for it like `connect`, with the same errors."""
        return self._await_announcement(member, self._geometry.ranks[member], self._geometry.ranks[self._geometry.me])

    def tell(self, reason: str, culprit: int) -> None:
        """Leave why the job was aborted for peers that have not attached yet; best effort, never raises."""
        with contextlib.suppress(RuntimeError, OSError):  # the store may have gone with the culprit
            self._store.set(self._key(self._geometry.me) + "/aborted", json.dumps([culprit, reason]))

    def _told(self, member: int) -> PeerLostError | None:
        """What the member left by `tell`, as an error."""
        key = self._key(member) + "/aborted"
        try:
            if not self._store.check([key]):
                return None
            culprit, reason = json.loads(self._store.get(key))
        except (RuntimeError, OSError):
            return None
        rank, me = self._geometry.ranks[member], self._geometry.ranks[self._geometry.me]
        return PeerLostError(
            f"rank {me}, attaching to rank {rank}: the job was aborted by rank {culprit}: {reason}", culprit=culprit
        )

    def _connect(self, member: int) -> Attachment:
        rank, me = self._geometry.ranks[member], self._geometry.ranks[self._geometry.me]
        said = self._await_announcement(member, rank, me)
        if said["digest"] != self._own["digest"]:
            raise LayoutMismatchError(self._difference(said, member, rank, me))
        answer = self._knock(said, rank, me)
        if "error" in answer.reply:
            for fd in answer.fds:
                os.close(fd)
            raise PeerLostError(f"rank {me}, attaching to rank {rank}: {answer.reply['error']}", culprit=rank)
        descriptor, self.bells[member] = answer.fds
        self.on_attach(member, answer.pid)
        return Attachment(fd=descriptor, nbytes=int(answer.reply["nbytes"]), digest=str(answer.reply["digest"]))

    def _knock(self, said: dict[str, Any], rank: int, me: int) -> Answer:
        request = {"op": "attach", "root": self._identity, "token": said["token"]}
        begin = time.monotonic()
        while True:
            try:
                return knock(said["door"], request, min(self._timeout_s, _KNOCK_S))
            except TimeoutError as error:  # it lives: stopped, or holding on to its interpreter lock
                self._aborted(f"attaching to rank {rank}")
                if time.monotonic() - begin >= self._timeout_s:
                    raise WaitTimeoutError(
                        f"rank {me}, attaching to rank {rank}: its server has not answered for {self._timeout_s:g} s",
                        culprit=rank,
                    ) from error
            except OSError as error:
                raise PeerLostError(
                    f"rank {me}, attaching to rank {rank}: its server does not answer ({error})", culprit=rank
                ) from error

    def _await_announcement(self, member: int, rank: int, me: int) -> dict[str, Any]:
        self._await_key(self._key(member), rank, me, "come up", self._raise_absent)
        said: dict[str, Any] = json.loads(self._store.get(self._key(member)))
        return said

    def _await_key(self, key: str, rank: int, me: int, what: str, late: Callable[[int, int], None]) -> None:
        """Return once `rank` has set `key` in the store; `what` it is waited for to do, `late` raises."""
        begin = time.monotonic()
        process = None
        try:
            while not self._store.check([key]):
                self._aborted(f"waiting for rank {rank} to {what}")
                process = process or process_of(self._store, rank)
                if process is not None and not process.alive() and not self._store.check([key]):
                    raise PeerLostError(
                        f"rank {me}, waiting for rank {rank} to {what}: rank {rank} died before its first minibatch",
                        culprit=rank,
                    )
                if time.monotonic() - begin > self._timeout_s:
                    late(rank, me)
                time.sleep(_POLL_S)
        finally:
            if process is not None:
                process.close()

    def meet(self) -> None:
        """Return once every member has called it; once a root, before its device memory is mapped.

        Raises as `connect` does.
        """
        me = self._geometry.ranks[self._geometry.me]
        self._store.set(self._key(self._geometry.me) + "/met", "1")
        try:
            for member in self._geometry.others():
                rank = self._geometry.ranks[member]
                self._await_key(self._key(member) + "/met", rank, me, "map device memory", self._raise_unmapped)
        except OdcError as error:
            self.on_failure(str(error), me if error.culprit is None else error.culprit)
            raise

    def _raise_unmapped(self, rank: int, me: int) -> None:
        raise WaitTimeoutError(
            f"rank {me}, waiting for rank {rank} to map the device memory of heap {self._identity}: it has not in "
            f"{self._timeout_s:g} s; on CUDA the ranks of a mesh meet when they first run a model, so with several "
            "models they must run them in the same order",
            culprit=rank,
        )

    def _raise_absent(self, rank: int, me: int) -> None:
        raise WaitTimeoutError(
            f"rank {me}, waiting for rank {rank} to come up: it has not created heap {self._identity} in "
            f"{self._timeout_s:g} s; every rank of the mesh must shard the same modules and run them, or enter "
            "`with model.minibatch()` if it has no data",
            culprit=rank,
        )

    def _difference(self, said: dict[str, Any], member: int, rank: int, me: int) -> str:
        text = f"rank {me} and rank {rank} laid out heap {self._identity} differently: "
        if self._own["settings"] != said.get("settings"):
            return text + f"rank {me} has settings {self._own['settings']}, rank {rank} has {said.get('settings')}"
        mine, theirs = self._own["units"], said["units"]
        if len(mine) != len(theirs):
            return text + f"rank {me} has {len(mine)} units, rank {rank} has {len(theirs)}"
        for i, ((name, digest), (other_name, other_digest)) in enumerate(zip(mine, theirs, strict=True)):
            if (name, digest) != (other_name, other_digest):
                text += f"the first unit to differ is {name!r} on rank {me} and {other_name!r} on rank {rank}"
                return text + self._first_lines(i, member, rank, me)
        return text + "settings or mesh differ"

    def _first_lines(self, unit: int, member: int, rank: int, me: int) -> str:
        """In what a unit differs from the peer's, if both have said so."""
        packed = self._store.get(self._key(member) + "/lines")
        lines: list[list[str]] = json.loads(zlib.decompress(base64.b64decode(packed)))
        if not lines or not self._lines:
            return ""
        pairs = itertools.zip_longest(self._lines[unit], lines[unit], fillvalue="nothing")
        mine, theirs = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
        return f": rank {me} has {mine}, rank {rank} has {theirs}" if mine else ""

    def ring(self, member: int) -> None:
        """Wake the member's daemon (attached before)."""
        os.eventfd_write(self.bells[member], 1)

    def close(self) -> None:
        """Give the peers' bells back, and drop the callbacks: the heap holds this object, and they the heap."""
        for fd in self.bells.values():
            os.close(fd)
        self.bells.clear()
        self.on_attach, self.on_failure = _ignore, _nobody
        self._aborted = _left
