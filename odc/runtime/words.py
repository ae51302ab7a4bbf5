"""The status board: which 64-bit word means what, and who may write it.

Chose single-writer words with release stores and acquire loads over locks: a reader that sees a word sees everything
that was written before it. Only ABORT has many writers; all of them write a reason and any one will do.

Words of a rank live in its own heap. "rank" below is the process that owns the heap, "daemon" its server.
"""

from __future__ import annotations

from enum import IntEnum


class Word(IntEnum):
    """Index of a word on the board."""

    PUBLISHED = 0  # rank: newest epoch whose shards can be fetched
    DONE = 1  # rank: newest epoch in which it will neither fetch nor push any more
    OUTCOME_EVEN = 2  # rank: how it closed its newest epoch of even number (see `Outcome`), written before DONE
    COMPLETE = 3  # rank: newest epoch whose accumulator holds every push (hybrid sharding reads it then)
    READ = 4  # rank: newest epoch for which it has read its replicas' accumulators
    ABORT = 5  # anyone: 0, or 1 + global rank of the culprit
    LEFT = 6  # rank: 1 once it has left the job in good order
    PROGRESS = 7  # rank: counts calls into odc; a wait's deadline starts anew when it moves
    STATE = 8  # rank: a State, for `odc status`
    MICROBATCH = 9  # rank: root forwards since begin
    FETCHED = 10  # rank: bytes fetched from peers since the start
    PUSHED = 11  # rank: bytes pushed to peers since the start
    WAITING = 12  # rank: 0, or 1 + global rank it waits for
    WAITING_EPOCH = 13  # rank: the epoch it waits for
    OFFERED = 14  # rank: newest epoch for which its microbatches lie in the queue
    PUBLISHING = 15  # rank: newest epoch that it has begun to publish; readers outside the job look at it
    OUTCOME_ODD = 16  # rank: as OUTCOME_EVEN, for epochs of odd number


BOARD_WORDS = 24  # room for a third cache line


class State(IntEnum):
    """Where a root is in its minibatch. FAILED: the end of a minibatch raised, and the job is aborted."""

    CLOSED = 0
    OPEN = 1
    FINISHING = 2
    FAILED = 3


class Outcome(IntEnum):
    """How a rank closed an epoch, in the low bits of OUTCOME_EVEN or OUTCOME_ODD; the epoch is in the others.

    A rank may close one more epoch before a slow peer has read its outcome of the last one, never two: the next begin
    waits for that peer's DONE. Two words by the epoch's parity therefore suffice, and one would lose outcomes.
    """

    TRAINED = 0
    EVALUATED = 1
    ABANDONED = 2


_OUTCOME_BITS = 2


def outcome_word(epoch: int) -> Word:
    """The word that holds the outcome of `epoch`."""
    return Word.OUTCOME_ODD if epoch % 2 else Word.OUTCOME_EVEN


def encode_outcome(epoch: int, outcome: Outcome) -> int:
    """Value of `outcome_word(epoch)`."""
    return epoch << _OUTCOME_BITS | outcome


def decode_outcome(word: int, epoch: int) -> Outcome | None:
    """The outcome of `epoch` in the value of `outcome_word(epoch)`; None if that rank has not closed the epoch."""
    return Outcome(word & (1 << _OUTCOME_BITS) - 1) if word >> _OUTCOME_BITS == epoch else None
