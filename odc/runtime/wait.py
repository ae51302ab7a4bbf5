"""Waiting for a peer: every wait of odc goes through here.

Chose polling with back-off (yield, then sleep 50 us growing to 1 ms) over a wake-up per event: a waiting rank costs one
core a few percent, and a peer never has to know who waits for it. Deadlines are per peer and start anew whenever that
peer calls into odc, so a compile or a checkpoint is not taken for a death; deaths come through the ABORT word, which
the own daemon sets within milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from odc.errors import PeerLostError, WaitTimeoutError
from odc.runtime.abort import abort, read_reason
from odc.runtime.layout import Space
from odc.runtime.words import Word
from odc.trace import WAIT, recorder

_YIELDS = 40
_FIRST_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 1e-3
_SPAN_NS = 50_000  # shorter waits are not worth a span


class Waiter:
    """Waits of one root; may be used from several threads of its rank.

    Args:
        space: the root's heaps.
        epoch: gives the own current epoch, for messages.
    """

    def __init__(self, space: Space, epoch: Callable[[], int]) -> None:
        self._space, self._epoch = space, epoch
        self._geometry = space.geometry
        self._own = space.board(space.geometry.me)

    def check(self, doing: str) -> None:
        """Raise `PeerLostError` if anyone aborted the job."""
        if self._own.load(Word.ABORT):
            self._raise_abort(self._geometry.me, doing)

    def until(self, ready: Callable[[], bool], member: int, what: str, *, lane: str = "main") -> None:
        """Return once `ready()` holds.

        Args:
            ready: cheap and free of side effects; evaluated again and again.
            member: whose progress makes it true.
            what: for messages, after "waiting for"; names what the member has to do.
            lane: trace lane of the waiting thread.

        Raises:
            PeerLostError: the member died, left or aborted.
            WaitTimeoutError: it made no progress for `timeout_s`.
        """
        self.check(f"waiting for {what}")
        if ready():
            return
        begin = recorder().now()
        self._own.store(Word.WAITING, 1 + self._geometry.ranks[member])
        self._own.store(Word.WAITING_EPOCH, self._epoch())
        try:
            self._poll(ready, member, what)
        finally:
            self._own.store(Word.WAITING, 0)
            if recorder().now() - begin > _SPAN_NS:
                recorder().add(WAIT, begin, peer=self._geometry.ranks[member], lane=lane)

    def _poll(self, ready: Callable[[], bool], member: int, what: str) -> None:
        peer = self._space.board(member)
        progress, moved = peer.load(Word.PROGRESS), time.monotonic()
        pause, polls = _FIRST_SLEEP_S, 0
        while True:
            polls += 1
            time.sleep(0 if polls < _YIELDS else pause)
            if ready():
                return
            if self._own.load(Word.ABORT):
                self._raise_abort(self._geometry.me, f"waiting for {what}")
            if polls < _YIELDS:
                continue
            pause = min(pause * 1.5, _LONGEST_SLEEP_S)
            if peer.load(Word.ABORT):
                self._raise_abort(member, f"waiting for {what}")
            # LEFT is written after the member's last other word, so a second look decides.
            if peer.load(Word.LEFT) and not ready():
                self._raise_left(member, what)
            seen = peer.load(Word.PROGRESS)
            if seen != progress:
                progress, moved = seen, time.monotonic()
            elif time.monotonic() - moved > self._space.settings.timeout_s:
                self._raise_timeout(member, what, peer.load(Word.PUBLISHED), peer.load(Word.DONE))

    def _me(self) -> str:
        return f"rank {self._geometry.ranks[self._geometry.me]} (epoch {self._epoch()})"

    def _raise_abort(self, member: int, doing: str) -> None:
        culprit = self._space.board(member).load(Word.ABORT) - 1
        reason = read_reason(self._space, member) or "no reason given"
        raise PeerLostError(f"{self._me()}, {doing}: the job was aborted by rank {culprit}: {reason}", culprit=culprit)

    def _raise_left(self, member: int, what: str) -> None:
        rank, note = self._geometry.ranks[member], read_reason(self._space, member)
        said = f"{self._me()}, waiting for {what}: rank {rank} has left the job (it ended or called odc.shutdown)"
        why = f"; the last error there was {note}" if note else ""
        raise PeerLostError(f"{said}{why}; every rank must run the same number of minibatches", culprit=rank)

    def _raise_timeout(self, member: int, what: str, published: int, done: int) -> None:
        rank, culprit = self._geometry.ranks[member], self._geometry.ranks[self._last_waited_for(member)]
        itself = f", and waits itself for rank {culprit}" if culprit != rank else ""
        said = (
            f"{self._me()}, waiting for {what}: rank {rank} has not called into odc for "
            f"{self._space.settings.timeout_s:g} s (it published epoch {published} and is done with epoch {done})"
            f"{itself}; raise Settings.timeout_s if it is only slow"
        )
        abort(self._space, said, culprit)  # or others would blame this rank, which ends now
        raise WaitTimeoutError(said, culprit=culprit)

    def _last_waited_for(self, member: int) -> int:
        """Whom the member waits for, and that one in turn, and so on: deadlines of one cause may run out together."""
        seen = {self._geometry.me, member}
        while self._space.heap.attached(member):
            rank = self._space.board(member).load(Word.WAITING) - 1
            following = self._geometry.ranks.index(rank) if rank in self._geometry.ranks else member
            if following in seen:
                break
            seen.add(following)
            member = following
        return member
