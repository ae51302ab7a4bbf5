"""The verbs of one root over its heaps: publish, fetch, push, done, wait.

Chose to keep the protocol's *order* in `odc.fsdp.minibatch` and only its *rules of visibility* here: each verb waits
for exactly what makes it sound (a fetch or push for the peer's PUBLISHED, and nothing else), so any caller that keeps
to the epochs is safe. No verb calls a collective.

Threads: `publish`, `claim`, `done` and the waits belong to the rank's main thread; `fetch` may run on the fetch thread
as well as on the main one, `push` on the sender thread alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from odc.memory import Words
from odc.runtime.abort import abort, read_text, write_text
from odc.runtime.layout import Space
from odc.runtime.push import Gradient, Pusher
from odc.runtime.queue import Claimed, Queue
from odc.runtime.ready import Ready
from odc.runtime.units import UnitSpec
from odc.runtime.wait import Waiter
from odc.runtime.words import Outcome, Word, decode_outcome, encode_outcome, outcome_word


class Verbs:
    """One-sided communication of one root.

    Args:
        space: the root's heaps, own one sealed.
        ring_bell: wakes the daemon of a member.
    """

    def __init__(self, space: Space, ring_bell: Callable[[int], None]) -> None:
        self.space, self.geometry, self.epoch = space, space.geometry, 0
        self.board = space.board(space.geometry.me)
        self.waiter = Waiter(space, functools.partial(self.board.load, Word.PUBLISHED))
        self._ready = Ready(space, self.waiter)
        self._pusher = Pusher(space, self._ready.to_push, self._ready.credit, ring_bell)
        self._counts = torch.zeros(space.param_base[-1], dtype=torch.int64)
        self._pushed_epoch = 0
        self._counting = threading.Lock()
        self.queue = Queue(space, self.waiter) if space.settings.queue_bytes else None

    def touch(self, doing: str) -> None:
        """Note progress for those who wait for this rank; raises `PeerLostError` if the job was aborted."""
        self.board.store(Word.PROGRESS, self.board.load(Word.PROGRESS) + 1)
        self.waiter.check(doing)

    # publish ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def publish(self, shards: Sequence[Sequence[torch.Tensor]], dirty: Sequence[bool]) -> None:
        """Open the next epoch: copy own shards to where peers can read them, in compute dtype.

        Args:
            shards: for each unit and parameter the own padded shard, 1-D, in its own dtype.
            dirty: for each unit whether its accumulator was added to since it was last zeroed.

        Waits for nobody: the caller has made sure that no peer reads or pushes any more.
        """
        me, epoch = self.geometry.me, self.epoch + 1
        self.board.store(Word.PUBLISHING, epoch)
        self.board.fence()  # a reader outside the job that sees any byte of this version sees the word above
        for unit, tensors in zip(self.space.units, shards, strict=True):
            places = [self.space.published(me, unit, i, epoch) for i in range(len(unit.params))]
            self.space.moves.publish(places, tensors)
        for unit, used in zip(self.space.units, dirty, strict=True):
            for source in range(self.space.sources if used else 0):
                self.space.accumulator(me, unit, source).zero_()
        self.space.heap.lanes.settle()
        self.epoch = epoch
        self.board.store(Word.PUBLISHED, self.epoch)  # release: shards and zeroed accumulators are visible before it

    # fetch ------------------------------------------------------------------------------------------------------

    def await_published(self, member: int, lane: str = "main") -> None:
        """Wait until `member` has published the current epoch; `lane` is the waiting thread's in the trace."""
        self._ready.published(member, lane)

    def fetch(self, unit: UnitSpec, destinations: Sequence[torch.Tensor], *, lane: str = "main") -> int:
        """Copy a whole unit out of its owners' heaps, one copy a shard; returns the bytes that came from peers.

        Args:
            unit: which.
            destinations: for each parameter 1-D contiguous [shards * padded shard] in compute dtype.

        Waits for each owner to publish the current epoch, one after the other, starting with the next shard.
        """
        fetched = 0

        def owners() -> Iterator[tuple[int, torch.Tensor]]:
            nonlocal fetched
            for owner in self.geometry.row_from_next():
                self.await_published(owner, lane)
                yield owner % self.geometry.shards, self.space.published_bytes(owner, unit, self.epoch)
                fetched += unit.published_bytes if owner != self.geometry.me else 0

        offsets = [spec.published_offset for spec in unit.params]
        self.space.moves.gather(destinations, offsets, self.geometry.shards, owners())
        self._count(Word.FETCHED, fetched)
        return fetched

    # push -------------------------------------------------------------------------------------------------------

    def push(self, unit: UnitSpec, gradients: Sequence[Gradient]) -> int:
        """Send gradients of `unit` to their owners; returns the bytes that left this rank (see `Pusher.push`)."""
        sent = self._pusher.push(unit, gradients)
        base = self.space.param_base[unit.index]
        for gradient in gradients:
            self._counts[base + gradient.param] += 1
        self._pushed_epoch = self.epoch
        self._count(Word.PUSHED, sent)
        return sent

    def _count(self, word: Word, nbytes: int) -> None:
        with self._counting:
            self.board.store(word, self.board.load(word) + nbytes)

    # claim ------------------------------------------------------------------------------------------------------

    def claim(self) -> Claimed | None:
        """The next microbatch of the queue, None once all are claimed (see `Queue.claim`); a root without one: None."""
        self.touch("claiming a microbatch")
        found = self.queue.claim() if self.queue is not None else None
        if found is not None and found.member != self.geometry.me:
            self._count(Word.FETCHED, found.nbytes)
        return found

    # done and wait ----------------------------------------------------------------------------------------------

    def done(self, outcome: Outcome, reason: str = "") -> None:
        """Close the own part of the epoch: neither fetch nor push follows. Everything pushed must be posted already.

        Writes the push counts to every member (only if something was pushed), the outcome, then DONE. `reason` is for
        the peers of a rank that abandons the epoch; its first bytes are kept.
        """
        lanes = self.space.heap.lanes
        with lanes.lane("fetch"):
            lanes.settle()  # own reads of peers' shards; pushes settled before their owners were told
        if outcome is Outcome.EVALUATED:
            self.board.store(Word.COMPLETE, self.epoch)
            self.board.store(Word.READ, self.epoch)
        elif self._pushed_epoch == self.epoch:
            for member in self.geometry.members:
                # An owner that has not opened this epoch may still read the counts of the last one.
                self.await_published(member)
                self.space.pushes(member, self.geometry.me).copy_(self._counts)
        if outcome is Outcome.ABANDONED:
            self._pusher.post_all()
            write_text(self.space.abandonment(self.geometry.me, self.epoch), reason)
        self.board.store(outcome_word(self.epoch), encode_outcome(self.epoch, outcome))
        self.board.store(Word.DONE, self.epoch)  # release: every push and count is visible before it

    def closed_as(self, outcome: Outcome) -> list[int]:
        """Members that have closed the current epoch with `outcome`; of all members once `await_done` has returned."""
        word = outcome_word(self.epoch)
        return [
            member
            for member in self.geometry.members
            if decode_outcome(self.space.board(member).load(word), self.epoch) is outcome
        ]

    def abandonment(self, member: int) -> str:
        """Why the member has abandoned the current epoch."""
        return read_text(self.space.abandonment(member, self.epoch))

    def await_done(self, epoch: int) -> None:
        """Wait until every member is done with `epoch`: nobody reads this epoch's shards or pushes any more."""
        self._await_word(Word.DONE, self.geometry.others(), epoch, "to finish")

    def await_word(self, word: Word, members: Sequence[int], what: str) -> None:
        """Wait until `word` of each of `members` has reached the current epoch; `what` they must do (for messages)."""
        self._await_word(word, members, self.epoch, what)

    def _await_word(self, word: Word, members: Sequence[int], epoch: int, what: str) -> None:
        for member in members:
            board = self.space.board(member)

            def reached(board: Words = board) -> bool:
                return board.load(word) >= epoch

            self.waiter.until(reached, member, f"rank {self.geometry.ranks[member]} {what} epoch {epoch}")

    def await_accumulated(self) -> None:
        """Wait until the own daemon has added every block that was posted to this rank."""
        me = self.geometry.me
        sent, accumulated = self.space.sent(me), self.space.accumulated(me)
        for source in self.geometry.row:

            def added(source: int = source) -> bool:
                return accumulated.load(source) == sent.load(source)

            rank = self.geometry.ranks[source]
            self.waiter.until(added, me, f"the own server to add what rank {rank} pushed")

    # abort ------------------------------------------------------------------------------------------------------

    def abort(self, reason: str, culprit: int) -> None:
        """End the job everywhere: set ABORT on this rank's board and on that of every member it is attached to.

        Never raises and waits for nobody. `culprit` is a global rank.
        """
        abort(self.space, reason, culprit)
