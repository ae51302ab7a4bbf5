"""The protocol of a minibatch: every store of a protocol word and every wait for one, in the order of the protocol.

    begin     wait: all DONE the last epoch, replicas READ | PUBLISHING | publish, zero accumulators | PUBLISHED
    fetch     wait: the owners' PUBLISHED | copy
    push      wait: the owner's PUBLISHED, a free slot | copy | SENT        daemon: add | ACCUMULATED
    offer     home: CLAIMED = 0 | table and inputs | OFFERED
    claim     wait: all OFFERED | CLAIMED + 1 at home | copy
    done      everything pushed is posted | counts of pushes to all members | OUTCOME | DONE
    collect   wait: all DONE, ACCUMULATED = SENT | COMPLETE | wait: replicas COMPLETE | write .grad | READ
              three replicas or more, before that: add an N-th of their sums up | REDUCED | wait: theirs

    sums      last push of a unit: added | LAST        daemon: all ranks of the host LAST | SUMMED, over the links
    collect   before .grad: wait: SUMMED of every unit, or COMPLETE | read what was not read, or has grown since

An arena has a protocol of its own (`odc.protocol.arena_protocol`). docs/protocol.md explains why both are right.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from odc.deadlines import WORD_SLEEP_S
from odc.errors import OdcError
from odc.memory import Words
from odc.protocol.check import ProtocolChecks
from odc.protocol.layout import HeapLayout
from odc.protocol.ring import RingWords
from odc.protocol.sink import NoOtherHosts, WordSink
from odc.protocol.units import UnitSpec
from odc.protocol.wait import Waiter
from odc.protocol.words import (
    ClaimWord,
    Outcome,
    RootState,
    VersionWord,
    Word,
    decode_outcome,
    decode_stepped,
    encode_outcome,
    outcome_word,
)

HOME = 0  # the member whose CLAIMED counts


class MemberProtocol:
    """One member's side of the protocol.

    `await_published`, `await_credit`, `count` and `abort` may be called from any thread of the rank, everything else
    from its main thread. Every wait raises PeerLostError and WaitTimeoutError as `Waiter.until` does. Over hosts what
    is stored also goes into `sink`. `beside` gives the boards of this rank's other roots: a call into one is progress
    in all.
    """

    def __init__(
        self, layout: HeapLayout, sink: WordSink | None = None, beside: Callable[[], Sequence[Words]] = tuple
    ) -> None:
        self.layout, self.grid = layout, layout.grid
        self.sink, self._beside = sink or NoOtherHosts(), beside
        if self.grid.remote:
            layout.mine.push_board(self.sink)
        checks = ProtocolChecks(self.grid, layout.peer) if layout.settings.check_protocol else None
        self.board = checks.board() if checks else layout.mine.board
        self._checks = checks
        note = functools.partial(_note_wait, self.board)
        self.waiter = Waiter(layout, functools.partial(abort, layout), note, self.sink.refresh, checks)
        self.epoch = 0  # this rank's newest
        self._known: tuple[int, frozenset[int]] = (0, frozenset())  # (epoch, members that have published it)
        self._stepped = self._stepped_before = False  # since the epoch was published, and between it and the last

    def attach_all(self) -> None:
        """Reach every member, waiting for each to come up; raises as `SymmetricHeap.tensor` does."""
        for member in self.grid.members:
            self.layout.peer(member).attach()
        for member in self.grid.local:
            self.layout.heap.whole(member)

    def touch(self, doing: str) -> None:
        """PROGRESS, for ranks that wait for this one; raises `PeerLostError` if the job was aborted."""
        for board in (self.board, *self._beside()):
            board.store(Word.PROGRESS, board.load(Word.PROGRESS) + 1)
        self.waiter.check(doing)

    # begin -------------------------------------------------------------------------------------------------------

    def await_end_of_epoch(self) -> None:
        """Wait until no member uses this rank's newest epoch any more: not its shards, nor its accumulators."""
        if self.epoch:
            self.await_done(self.epoch)
            readers = [member for member in self.summed_with() if member != self.grid.me]
            self._await_word(Word.READ, readers, self.epoch, "to read the accumulators of")

    def summed_with(self) -> tuple[int, ...]:
        """Members that read this rank's accumulators or its node's sums, and it theirs; itself included."""
        nodes = self.grid.nodes
        return self.grid.replica_group + (nodes.partners if nodes.shards_span_hosts else ())

    def begin_publishing(self) -> int:
        """PUBLISHING; returns the epoch. Shards may be written after it."""
        epoch = self.epoch + 1
        if self.board.load(Word.PUBLISHING) < epoch:  # or publishing it was interrupted
            self.board.store(Word.PUBLISHING, epoch)
        self.board.fence()  # a reader outside the job that sees any byte of this version sees the word above
        return epoch

    def note_step(self) -> None:
        """An optimizer changes this rank's shards."""
        self._stepped = True

    def end_publishing(self) -> None:
        self.epoch += 1
        self._stepped_before, self._stepped = self._stepped, False
        self.board.store(Word.PUBLISHED, self.epoch)  # release: shards and zeroed accumulators are visible before it

    def note_version(self, unit: UnitSpec, packed: int, place: int, checksum: int) -> None:
        """CHANGED and its neighbours: the epoch that is being published brings another shard of `unit`."""
        versions, history = self.layout.mine.versions(unit), self.layout.mine.history()[:, unit.index]
        history[1:] = history[:-1].copy()
        versions.store(VersionWord.BASE, versions.load(VersionWord.CHANGED))
        versions.store(VersionWord.CHANGED, self.epoch + 1)
        versions.store(VersionWord.PACKED, packed)
        versions.store(VersionWord.CHECKSUM, checksum)
        versions.store(VersionWord.PLACE, place)

    # fetch and push ----------------------------------------------------------------------------------------------

    def await_published(self, members: Sequence[int], lane: str = "main") -> None:
        """Wait until each of `members` has begun this rank's current epoch; `lane` is the thread's in the trace."""
        epoch = self.board.load(Word.PUBLISHED)
        known_epoch, known = self._known
        for member in members:
            if known_epoch == epoch and member in known:
                continue
            board = self.layout.peer(member).board
            what = f"rank {self.grid.ranks[member]} to publish epoch {epoch}"
            self.waiter.until_word(board, Word.PUBLISHED, epoch, member, what, lane=lane)
            # One assignment: a thread that overwrites another's news costs that one a second load, nothing else.
            known_epoch, known = self._known = epoch, (known if known_epoch == epoch else frozenset()) | {member}

    def has_published(self, member: int, epoch: int) -> bool:
        """Whether `await_published` would not wait, in `epoch`."""
        return self.layout.peer(member).board.load(Word.PUBLISHED) >= epoch

    def await_credit(self, owner: int, credit: Callable[[], int]) -> None:
        """Wait until the ring to `owner` has a free slot; `credit()` counts them. On the sender's thread."""
        if credit() <= 0:
            rank = self.grid.ranks[owner]
            what = f"a free staging slot of rank {rank} (its server has to add what was pushed)"
            self.waiter.until(lambda: credit() > 0, owner, what, lane="push", word="ACCUMULATED")

    def ring(self, owner: int, source: int) -> RingWords:
        return RingWords(self.layout, owner, source)

    # the queue of microbatches -----------------------------------------------------------------------------------

    def reset_claims(self) -> None:
        """CLAIMED, which counts at home, and the words beside it. Before `offer`, in the epoch that is open."""
        for word in ClaimWord:
            self.layout.mine.claims.store(word, 0)

    def offer(self) -> None:
        """OFFERED: this rank's table and inputs of the current epoch are in place."""
        self.board.store(Word.OFFERED, self.epoch)  # release: counter, table and inputs are visible before it

    def await_offers(self) -> bool:
        """Wait until every member has offered; False if one has abandoned the minibatch instead. Raises OdcError if one
        closed this epoch without an offer.
        """
        epoch = self.epoch
        for member in self.grid.members:
            board, rank = self.layout.peer(member).board, self.grid.ranks[member]

            def settled(board: Words = board) -> bool:
                return board.load(Word.OFFERED) >= epoch or board.load(Word.DONE) >= epoch

            what = f"rank {rank} to offer its microbatches of epoch {epoch}"
            self.waiter.until(settled, member, what, word="OFFERED")
            if board.load(Word.OFFERED) < epoch:
                if decode_outcome(board.load(outcome_word(epoch)), epoch) is Outcome.ABANDONED:
                    return False
                raise OdcError(
                    f"rank {self.grid.rank} (epoch {epoch}) shares a queue, but rank {rank} ended that minibatch "
                    "without an offer; every rank must call model.claim(), with an empty list if it has loaded nothing",
                    culprit=rank,
                )
        return True

    def note_total(self, total: int) -> None:
        """TOTAL: what all members have offered."""
        self.layout.mine.claims.store(ClaimWord.TOTAL, 1 + total)

    def claim_at_home(self) -> int:
        """CLAIMED: number of the next microbatch, perhaps over the queue's end; home is on this host. On any thread."""
        return self.layout.local(HOME).claims.add(ClaimWord.CLAIMED, 1)

    def claims_at_home(self) -> int:
        """CLAIMED as it stands; home is on this host. On any thread."""
        return self.layout.local(HOME).claims.load(ClaimWord.CLAIMED)

    def note_claim(self, number: int) -> None:
        """CLAIMED of a rank whose home is on another host: as far as this rank knows, for `odc status`."""
        self.layout.mine.claims.store(ClaimWord.CLAIMED, number + 1)

    def note_claimed(self) -> None:
        """MINE: this rank has copied one microbatch more."""
        claims = self.layout.mine.claims
        claims.store(ClaimWord.MINE, claims.load(ClaimWord.MINE) + 1)

    # sums over hosts ---------------------------------------------------------------------------------------------

    def say_last(self, counts: Mapping[int, int]) -> bool:
        """LAST: this rank pushes these units no more in the current epoch; by unit, how often it has since the start.

        Returns whether every rank of this host has stored it of one unit. On the sender's thread, or after it is idle.
        """
        lasts, epoch = self.layout.mine.lasts, self.epoch
        if self._checks is not None:
            lasts = self._checks.lasts(lasts)
        for unit, count in counts.items():
            lasts.store(2 * unit, count)
            lasts.store(2 * unit + 1, epoch)  # release: what was added is visible before it
        lasts.fence()  # of two ranks that store it at the same time one at least sees both
        others = [self.layout.local(member).lasts for member in self.grid.local]
        return any(all(words.load(2 * unit + 1) == epoch for words in others) for unit in counts)

    def summed(self, unit: int) -> int | None:
        """How often this host's ranks have pushed `unit`, if all have stored LAST of it. On the daemon's thread."""
        epoch, count = self.board.load(Word.PUBLISHED), 0
        for member in self.grid.local:
            lasts = self.layout.local(member).lasts
            if lasts.load(2 * unit + 1) != epoch:
                return None
            count += lasts.load(2 * unit)
        return count

    def await_sums(self, partner: int, arrived: Callable[[], bool]) -> None:
        """Wait until `partner` has stored SUMMED for all that this rank needs (`arrived()`), or is COMPLETE."""
        board, epoch = self.layout.peer(partner).board, self.epoch
        what = f"rank {self.grid.ranks[partner]} to complete its host's sums of epoch {epoch}"
        # COMPLETE comes right after the last SUMMED.
        pause = functools.partial(board.wait_at_least, Word.COMPLETE, epoch, WORD_SLEEP_S)

        def complete() -> bool:
            return arrived() or board.load(Word.COMPLETE) >= epoch

        self.waiter.until(complete, partner, what, pause=pause, word="SUMMED")

    def await_reads(self, member: int, what: str, over: Callable[[float], bool]) -> None:
        """Wait until a thread of this rank has read `what`, of a `member` that may have LEFT; `over` as `Job.over`."""
        ready, pause = functools.partial(over, 0.0), functools.partial(over, WORD_SLEEP_S)
        text = f"its thread to read {what} of epoch {self.epoch}"
        self.waiter.until(ready, member, text, pause=pause, may_leave=True)

    # done --------------------------------------------------------------------------------------------------------

    def skip_collect(self) -> None:
        """COMPLETE and READ of an epoch without pushes. Before `close`."""
        self.board.store(Word.COMPLETE, self.epoch)
        self.board.store(Word.READ, self.epoch)

    def share_counts(self, counts: torch.Tensor) -> None:
        """Write how often this rank has pushed each parameter since the start to every member. Before `close`."""
        for member in self.grid.members:
            # An owner that has not opened this epoch may still read the counts of the last one.
            self.await_published((member,))
            if not self.grid.is_remote(member):
                self.layout.local(member).pushes(self.grid.me).copy_(counts)
        self.sink.send_counts(counts)

    def await_links(self) -> None:
        """Wait until this rank is linked to every other host, so that they learn of its DONE whenever it ends."""
        for partner in self.grid.partners:
            what = f"rank {self.grid.ranks[partner]} to link its host to this one"
            self.waiter.until(functools.partial(self.sink.up, partner), partner, what)

    def give_up(self) -> None:
        """GIVING_UP: some rank abandons the current epoch, so this one exchanges nothing more for its results."""
        self.board.store(Word.GIVING_UP, self.epoch)

    def gives_up(self, member: int) -> bool:
        """Whether a member knows that the current epoch's minibatch will be abandoned."""
        return self.layout.peer(member).board.load(Word.GIVING_UP) >= self.epoch

    def is_done(self, member: int) -> bool:
        """Whether a member computes nothing more in the current epoch."""
        return self.layout.peer(member).board.load(Word.DONE) >= self.epoch

    def explain(self, reason: str) -> None:
        """Say why this rank abandons the current epoch. Before `close`."""
        self.layout.mine.set_abandonment(self.epoch, reason)

    def close(self, outcome: Outcome) -> None:
        """OUTCOME, then DONE: this rank neither fetches nor pushes in this epoch any more, and all is posted."""
        self.board.store(outcome_word(self.epoch), encode_outcome(self.epoch, outcome, self._stepped_before))
        self.board.store(Word.DONE, self.epoch)  # release: every push and count is visible before it

    # collect -----------------------------------------------------------------------------------------------------

    def await_done(self, epoch: int) -> None:
        """Wait until every member is done with `epoch`: no rank reads this epoch's shards or pushes any more."""
        self._await_word(Word.DONE, self.grid.others(), epoch, "to finish")

    def await_accumulated(self) -> None:
        """Wait until this rank's daemon has added every block that was posted to it."""
        for source in self.grid.nodes.local_shard_group:
            ring = self.ring(self.grid.me, source)

            def added(ring: RingWords = ring) -> bool:
                return ring.added() == ring.posted()

            what = f"this rank's server to add what rank {self.grid.ranks[source]} pushed"
            self.waiter.until(added, self.grid.me, what, word="ACCUMULATED")

    def closed_as(self, outcome: Outcome) -> list[int]:
        """Members that have closed the current epoch with `outcome`; all that have, once `await_done` has returned."""
        word, epoch = outcome_word(self.epoch), self.epoch
        boards = [self.layout.peer(member).board for member in self.grid.members]
        return [member for member, board in enumerate(boards) if decode_outcome(board.load(word), epoch) is outcome]

    def stepped(self) -> list[bool]:
        """For each member whether its optimizer had stepped between this epoch and the last. After `await_done`."""
        word = outcome_word(self.epoch)
        return [decode_stepped(self.layout.peer(member).board.load(word)) for member in self.grid.members]

    def abandonment(self, member: int) -> str:
        return self.layout.peer(member).abandonment(self.epoch)

    def complete(self, *, wait: bool = True) -> None:
        """COMPLETE: this rank's accumulators, and its sums for its partners, hold every push.

        Then, with `wait`, wait for those of its replicas and partners; `await_sums` is another way.
        """
        self.board.store(Word.COMPLETE, self.epoch)
        if wait and len(others := self.summed_with()) > 1:
            self._await_word(Word.COMPLETE, others, self.epoch, "to complete the accumulators of")

    def end_reducing(self) -> None:
        """REDUCED: this rank's N-th of its replicas' accumulators is added up, in its own."""
        self.board.store(Word.REDUCED, self.epoch)

    def await_reduced(self, replica: int) -> None:
        """Wait until a replica has added its N-th up."""
        self._await_word(Word.REDUCED, (replica,), self.epoch, "to add up its part of the gradients of")

    def read_all(self) -> None:
        """READ: this rank has read its replicas' accumulators, and its reads have settled."""
        self.board.store(Word.READ, self.epoch)

    def _await_word(self, word: Word, members: Sequence[int], epoch: int, what: str) -> None:
        for member in members:
            board = self.layout.peer(member).board
            self.waiter.until_word(board, word, epoch, member, f"rank {self.grid.ranks[member]} {what} epoch {epoch}")

    # status, and the end -----------------------------------------------------------------------------------------

    def set_state(self, state: RootState) -> None:
        self.board.store(Word.STATE, int(state))

    def count_microbatch(self) -> None:
        self.board.store(Word.MICROBATCH, self.board.load(Word.MICROBATCH) + 1)

    def reset_microbatches(self) -> None:
        self.board.store(Word.MICROBATCH, 0)

    def count(self, word: Word, nbytes: int) -> None:
        """FETCHED, PUSHED or SAVED."""
        self.board.count(word, nbytes)

    def abort(self, reason: str, culprit: int) -> None:
        abort(self.layout, reason, culprit)

    def leave(self, note: str, culprit: int | None = None) -> None:
        """LEFT: this rank shuts down. A peer that waits in vain raises with `note`, and names `culprit` if given."""
        if note and not self.board.load(Word.ABORT):
            self.layout.mine.set_reason(note)
        self.board.store(Word.LEFT, 1 if culprit is None else 2 + culprit)


def _note_wait(board: Words, rank: int | None) -> None:
    """WAITING_EPOCH and WAITING: this rank waits for `rank`, a global one, or for none. On any thread."""
    if rank is not None:
        board.store(Word.WAITING_EPOCH, board.load(Word.PUBLISHED))
    board.store(Word.WAITING, 0 if rank is None else 1 + rank)


def abort(layout: HeapLayout, reason: str, culprit: int) -> None:
    """ABORT, with `reason`, on this rank's board and those of members it is attached to; `culprit` is a global rank.

    The first reason on a board stays. Never raises, never waits, never attaches. May be called from any thread.
    """
    for member in layout.grid.local:  # this rank's board sends it to other hosts
        with contextlib.suppress(Exception):  # closed in the meantime; the others still get it
            peer = layout.peer(member)
            if (member == layout.grid.me or peer.attached) and not peer.board.load(Word.ABORT):
                peer.set_reason(reason)
                peer.board.store(Word.ABORT, 1 + culprit)
