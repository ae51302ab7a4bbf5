"""Every wait of odc: how a thread polls, when its deadline passes, and which rank is to blame.

A waiting thread first yields, then sleeps, from 50 us growing to 1 ms. Over hosts, where waits
are long, it sleeps until the word is stored. A deadline belongs to one peer and starts anew whenever that peer calls
into odc. Deaths arrive through the ABORT word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from odc.deadlines import (
    REASON_LONGEST_POLL_S,
    REASON_POLL_S,
    REASON_S,
    WORD_FIRST_SLEEP_S,
    WORD_LONGEST_OVER_HOSTS_S,
    WORD_LONGEST_SLEEP_S,
    WORD_SLEEP_S,
    Backoff,
    Deadline,
    last_in_chain,
)
from odc.errors import PeerLostError, WaitTimeoutError, aborted_by
from odc.memory import Words
from odc.protocol.check import ProtocolChecks
from odc.protocol.layout import HeapLayout
from odc.protocol.words import UNREACHED, Word
from odc.trace import WAIT, recorder

_YIELDS = 39
_SPAN_NS = 50_000  # shorter waits are not worth a span
_SAME_NUMBER = (
    "every rank must run the same number of minibatches (outside of `with model.minibatch():` each backward is one)"
)


class Waiter:
    """Waits for words of a root's members, from any thread.

    `abort` is given a reason and the culprit's global rank; `note` is given the global rank that is waited for, and
    None when the wait is over. `refresh` is called now and then by a thread that waits. `checks` learn of every wait.
    """

    def __init__(
        self,
        layout: HeapLayout,
        abort: Callable[[str, int], None],
        note: Callable[[int | None], None],
        refresh: Callable[[], None],
        checks: ProtocolChecks | None = None,
    ) -> None:
        self._layout, self._grid, self._abort, self._note = layout, layout.grid, abort, note
        self._board, self._checks = layout.mine.board, checks
        self._refresh, self._over_hosts = refresh, bool(layout.grid.remote)

    def check(self, doing: str) -> None:
        """Raise `PeerLostError` if a rank aborted the job."""
        if self._board.load(Word.ABORT):
            self._raise_abort(self._grid.me, doing)

    def await_reason(self, doing: str) -> None:
        """Wait until the daemon stores ABORT with the cause of a loss, which its links and handles know: raises
        PeerLostError as `check` does, or returns after five seconds without one. Never on the daemon's thread.
        """
        deadline, backoff = Deadline(REASON_S), Backoff(REASON_POLL_S, REASON_LONGEST_POLL_S)
        while not deadline.passed():
            self.check(doing)
            backoff.sleep()

    def until(
        self,
        ready: Callable[[], bool],
        member: int,
        what: str,
        *,
        lane: str = "main",
        pause: Callable[[], object] | None = None,
        may_leave: bool = False,
        word: str = "",
        noted: bool = True,
    ) -> None:
        """Return once `ready()`, which is evaluated again and again and must have no side effect, holds.

        `member` is whose progress makes it true; `what` it has to do follows "waiting for" in messages; `lane` is the
        thread's in the trace; `pause` sleeps between two checks, a tenth of a second at most, where another thread of
        this rank can wake it. Raises PeerLostError if the member died, shut down or aborted, WaitTimeoutError if it
        made no progress for `timeout_s`. With `may_leave` its memory is read, which stays when it shuts down.
        `word` names what the member stores, if it is a word of the table (`odc.protocol.table`). `noted` is False on a
        thread beside which the training thread may compute: its wait is not on the board, where the rank's are.
        """
        if word and self._checks is not None:
            self._checks.awaited(word, member)
        self.check(f"waiting for {what}")
        if ready():
            return
        begin = recorder().now_on(lane)
        try:
            if noted:
                self._note(self._grid.ranks[member])
            self._poll(ready, member, what, pause, may_leave)
        finally:
            if noted:
                self._note(None)
            end = recorder().now_on(lane)
            if end - begin > _SPAN_NS:
                recorder().add(WAIT, begin, end_ns=end, peer=self._grid.ranks[member], lane=lane)

    def until_word(self, words: Words, index: int, least: int, member: int, what: str, *, lane: str = "main") -> None:
        """As `until`, for word `index` of a board to be `least` or more. Over hosts its writer must `wake`."""
        ready = functools.partial(_reached, words, index, least)
        pause = functools.partial(words.wait_at_least, index, least, WORD_SLEEP_S) if self._over_hosts else None
        self.until(ready, member, what, lane=lane, pause=pause, word=Word(index).name)

    def _poll(
        self, ready: Callable[[], bool], member: int, what: str, pause: Callable[[], object] | None, may_leave: bool
    ) -> None:
        peer = self._layout.peer(member).board
        deadline = Deadline(self._layout.settings.timeout_s, peer.load(Word.PROGRESS))
        longest = WORD_LONGEST_OVER_HOSTS_S if self._over_hosts else WORD_LONGEST_SLEEP_S
        backoff = Backoff(WORD_FIRST_SLEEP_S, longest, yields=0 if pause else _YIELDS)
        sleep = pause or backoff.sleep
        while True:
            sleep()
            if ready():
                return
            if self._board.load(Word.ABORT):
                self._raise_abort(self._grid.me, f"waiting for {what}")
            if backoff.yielding:
                continue
            self._refresh()
            if peer.load(Word.ABORT):
                self._raise_abort(member, f"waiting for {what}")
            # LEFT is written after the member's last other word, so a second load decides.
            if not may_leave and peer.load(Word.LEFT) and not ready():
                self._raise_left(member, what)
            if deadline.passed(peer.load(Word.PROGRESS)):
                self._raise_timeout(member, what, peer.load(Word.PUBLISHED), peer.load(Word.DONE))

    def _epoch(self) -> int:
        return self._board.load(Word.PUBLISHED)

    def _me(self) -> str:
        return f"rank {self._grid.rank} (epoch {self._epoch()})"

    def _raise_abort(self, member: int, doing: str) -> None:
        peer = self._layout.peer(member)
        culprit = peer.board.load(Word.ABORT) - 1
        reason = peer.reason or "no reason given"
        raise aborted_by(f"{self._me()}, {doing}", culprit, reason)

    def _raise_left(self, member: int, what: str) -> None:
        column = self._grid.column(member)
        if member != column and self._layout.local(column).board.load(Word.LEFT):
            member = column  # through which the other host's state arrives
        peer, rank = self._layout.peer(member), self._grid.ranks[member]
        note, left = peer.reason, peer.board.load(Word.LEFT)
        text = f"{self._me()}, waiting for {what}: rank {rank}"
        if left == UNREACHED:
            raise PeerLostError(f"{text} cannot be reached: {note}", culprit=rank)
        text += " has left the job (it ended or called odc.shutdown)"
        why = f"; the last error there was {note}" if note else ""
        raise PeerLostError(f"{text}{why}; {_SAME_NUMBER}", culprit=left - 2 if left >= 2 else rank)

    def _raise_timeout(self, member: int, what: str, published: int, done: int) -> None:
        rank = self._grid.ranks[member]
        culprit = self._grid.ranks[last_in_chain(member, self._grid.me, self._waits_for)]
        itself = f", and waits itself for rank {culprit}" if culprit != rank else ""
        behind = f", and {_SAME_NUMBER}" if done == published < self._epoch() else ""
        text = (
            f"{self._me()}, waiting for {what}: rank {rank} has not called into odc for "
            f"{self._layout.settings.timeout_s:g} s (it published epoch {published} and is done with epoch {done})"
            f"{itself}; raise Settings.timeout_s if it is only slow{behind}"
        )
        self._abort(text, culprit)  # or others would blame this rank, which ends now
        raise WaitTimeoutError(text, culprit=culprit)

    def _waits_for(self, member: int) -> int | None:
        peer = self._layout.peer(member)
        rank = peer.board.load(Word.WAITING) - 1 if peer.attached else -1
        return self._grid.ranks.index(rank) if rank in self._grid.ranks else None


def _reached(words: Words, index: int, least: int) -> bool:
    return words.load(index) >= least
