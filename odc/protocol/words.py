"""The 64-bit words of the protocols, which only `protocol` and `arena_protocol` store (docs/protocol.md)."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Word(IntEnum):
    """Index of a word on a rank's board. Unless noted otherwise the rank itself writes it."""

    PUBLISHED = 0  # newest epoch whose shards can be fetched
    DONE = 1  # newest epoch in which the rank will neither fetch nor push any more
    OUTCOME_EVEN = 2  # how the rank closed its newest epoch of even number (see `Outcome`); written before DONE
    COMPLETE = 3  # newest epoch whose accumulator holds every push; under hybrid sharding replicas read it then
    READ = 4  # newest epoch for which the rank has read its replicas' accumulators
    ABORT = 5  # 0, or 1 + global rank of the culprit; written by any rank
    LEFT = 6  # 1 once the rank has shut down, or 2 + the global rank whose error made it; or `UNREACHED`
    PROGRESS = 7  # counts calls into odc; the deadline of a wait for this rank starts anew when it moves
    STATE = 8  # a RootState, for `odc status`
    MICROBATCH = 9  # forwards of the root since the epoch began
    FETCHED = 10  # bytes fetched from peers since the start
    PUSHED = 11  # bytes pushed to peers since the start
    WAITING = 12  # 0, or 1 + global rank of the peer that this rank waits for
    WAITING_EPOCH = 13  # the epoch in which it waits
    OFFERED = 14  # newest epoch for which the rank's microbatches are in the queue
    PUBLISHING = 15  # newest epoch that the rank has begun to publish; readers outside the job load it
    OUTCOME_ODD = 16  # as OUTCOME_EVEN, for epochs of odd number
    GIVING_UP = 17  # newest epoch of whose minibatch the rank knows, before its end, that it will be abandoned
    REDUCED = 18  # newest epoch for which the rank has added up its part of its replicas' accumulators
    SAVED = 19  # bytes of shards that this rank did not have to read from other hosts, since the start


BOARD_WORDS = 24  # three cache lines of eight; the last four are free
UNREACHED = -1  # LEFT in the mirror of a rank on another host that this host cannot connect to; the reason is why


class ClaimWord(IntEnum):
    """Index of a word beside the queue of microbatches (see `odc.protocol.queue`)."""

    CLAIMED = 0  # at home: microbatches claimed in this epoch; every member adds to it, of another host by asking
    MINE = 1  # microbatches that this member has claimed, for `odc status`
    TOTAL = 2  # 0, or 1 + microbatches that all members have offered, for `odc status`


class EntryWord(IntEnum):
    """Index of a word of a channel's entry in an arena (see `odc.runtime.arena`); the owner writes them."""

    STEP = 0  # the step whose entry can be read
    OFFSET = 1  # where in the owner's arena it begins
    NBYTES = 2
    SIGNATURE = 3  # what the owner and its readers must agree on; 0 if nothing


ARENA_TABLE, ARENA_TAKEN = "arena/table", "arena/taken"  # regions of words that other hosts keep mirrors of


class VersionWord(IntEnum):
    """Index among the words of a unit that name the published version of its shard (see `odc.protocol.changes`)."""

    CHANGED = 0  # the epoch that brought this version
    BASE = 1  # the epoch that brought the one before
    PACKED = 2  # bytes of the changes between the two; -1: they cannot be read
    CHECKSUM = 3  # of the whole shard, where the protocol is checked, else 0
    PLACE = 4  # where in the region of changes they begin, in bytes


class Version(NamedTuple):
    """The words of `VersionWord`, as they stand."""

    changed: int
    base: int
    packed: int
    checksum: int
    place: int


VERSION_WORDS = len(VersionWord)
VERSIONS_KEPT = 4  # of each unit, the newest included: so many may lie between two reads from outside the job


class RootState(IntEnum):
    """Where a root is in its minibatch. FAILED: the end of a minibatch raised, and the job is aborted."""

    CLOSED = 0
    OPEN = 1
    FINISHING = 2
    FAILED = 3


class Outcome(IntEnum):
    """How a rank closed an epoch: the low bits of OUTCOME_EVEN or OUTCOME_ODD.

    Above them stands whether its optimizer had stepped since the epoch before, above that the epoch.
    """

    TRAINED = 0
    EVALUATED = 1
    ABANDONED = 2


_STEPPED = 1 << 2
_OUTCOME_BITS = 3


def outcome_word(epoch: int) -> Word:
    """The word that holds the outcome of `epoch`."""
    return Word.OUTCOME_ODD if epoch % 2 else Word.OUTCOME_EVEN


def encode_outcome(epoch: int, outcome: Outcome, stepped: bool = False) -> int:
    """Value of `outcome_word(epoch)`."""
    return epoch << _OUTCOME_BITS | (_STEPPED if stepped else 0) | outcome


def decode_outcome(word: int, epoch: int) -> Outcome | None:
    """The outcome of `epoch` in the value of `outcome_word(epoch)`; None if the rank has not closed the epoch."""
    return Outcome(word & _STEPPED - 1) if word >> _OUTCOME_BITS == epoch else None


def decode_stepped(word: int) -> bool:
    """Whether an optimizer had changed the shards since the epoch before, in the value of an outcome's word."""
    return bool(word & _STEPPED)
