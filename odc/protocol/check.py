"""`Settings(check_protocol=True)`: stores to boards, LAST and rings are held against the table of the protocol.

Without the setting none of this is made: a board is plain words, and a store costs what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from odc.memory import Words
from odc.protocol.grid import RankGrid
from odc.protocol.peers.board import PeerBoard
from odc.protocol.table import RULES, Need, WordRule
from odc.protocol.words import Word


class ProtocolEvent(NamedTuple):
    """A store by a rank, or a wait that it begins: for the word of `member`, in the rank's epoch."""

    rank: int  # the member that stores or waits
    kind: str  # "store" or "wait"
    word: str
    member: int
    value: int  # of a wait the epoch


#: Called with every event of this process, on the thread of it; for tests.
listeners: list[Callable[[ProtocolEvent], None]] = []


class CheckedWords(Words):
    """Words whose stores are checked first: `check` is given the index, the value before and the one to be stored."""

    __slots__ = ("_check", "_inner")

    def __init__(self, inner: Words, check: Callable[[int, int, int], None]) -> None:
        super().__init__(inner._address, len(inner), inner)
        self._inner, self._check = inner, check

    def store(self, i: int, value: int) -> None:
        self._check(i, self.load(i), value)
        self._inner.store(i, value)


class ProtocolChecks:
    """The checks of one rank and root, given its peers by member.

    Any thread may store; no check waits, and none attaches to a peer.
    """

    def __init__(self, grid: RankGrid, peer: Callable[[int], PeerBoard]) -> None:
        self._grid, self._peer, self._board = grid, peer, peer(grid.me).board

    def board(self) -> Words:
        """This rank's board, checked."""
        names = {int(word): word.name for word in Word}
        return CheckedWords(self._board, lambda i, before, value: self.stored(names[i], before, value))

    def lasts(self, words: Words) -> Words:
        """LAST of this rank, checked; counts and epochs take turns."""

        def check(i: int, before: int, value: int) -> None:
            if i % 2:
                self.stored("LAST", before, value)

        return CheckedWords(words, check)

    def ring(self, owner: int, source: int, sent: Words, accumulated: Words, slots: int) -> tuple[Words, Words]:
        """SENT and ACCUMULATED in the heap of `owner`, checked where they are of the ring from `source`."""

        def post(i: int, before: int, value: int) -> None:
            _refuse_overrun(value, accumulated.load(source), slots)
            self.stored("SENT", before, value, owner)

        def give_back(i: int, before: int, value: int) -> None:
            _refuse_overrun(sent.load(source), value, slots)
            self.stored("ACCUMULATED", before, value, source)

        return CheckedWords(sent, post), CheckedWords(accumulated, give_back)

    def awaited(self, name: str, member: int) -> None:
        """This rank begins to wait for a word of `member`. The table must name one that stores it."""
        if not RULES[name].awaited:
            raise AssertionError(f"rank {self._grid.rank} waits for {name}, for which no rank waits by the table")
        self._note(ProtocolEvent(self._grid.me, "wait", name, member, self._epoch()))

    def stored(self, name: str, before: int, value: int, other: int | None = None) -> None:
        """This rank is about to store a word; `other` is the member at the other end of the ring, if it is of one."""
        rule = RULES[name]
        if not self._board.load(Word.ABORT):  # after it, nothing that is added or copied will be used
            self._refuse_falling(rule, before, value)
            epoch = value if rule.kind == "epoch" else self._epoch()
            for need in rule.needs:
                self._refuse_early(rule, need, epoch, other)
        self._note(ProtocolEvent(self._grid.me, "store", name, self._grid.me if other is None else other, value))

    def _refuse_falling(self, rule: WordRule, before: int, value: int) -> None:
        falls = value <= before if rule.kind == "epoch" else value < before and rule.kind == "count"
        if falls:
            raise AssertionError(f"rank {self._grid.rank} stores {rule.name} = {value} after {before}: it must rise")

    def _refuse_early(self, rule: WordRule, need: Need, epoch: int, other: int | None) -> None:
        if need.once_done and self._board.load(Word.DONE) < epoch:
            return
        bound, word = epoch + need.plus, Word[need.word]
        for member in self._members(need, other):
            peer = self._peer(member)
            if member != self._grid.me and not peer.attached:
                continue
            found = peer.board.load(word)
            if found > bound if need.at_most else found < bound:
                raise AssertionError(
                    f"rank {self._grid.rank} stores {rule.name} in epoch {epoch}, but {need.word} of rank "
                    f"{self._grid.ranks[member]} is {found}: the protocol needs {need}"
                )

    def _members(self, need: Need, other: int | None) -> Iterable[int]:
        grid = self._grid
        if need.whose == "the owner":
            return () if other is None else (other,)
        found: dict[str, Iterable[int]] = {
            "this rank": (grid.me,),
            "every rank": grid.members,
            "replicas": grid.replica_group,
            "owners": grid.nodes.local_shard_group,
        }
        return found[need.whose]

    def _epoch(self) -> int:
        return self._board.load(Word.PUBLISHED)

    def _note(self, event: ProtocolEvent) -> None:
        for listener in listeners:
            listener(event)


def _refuse_overrun(sent: int, accumulated: int, slots: int) -> None:
    if not 0 <= sent - accumulated <= slots:
        raise AssertionError(f"a ring of {slots} slots would hold blocks {accumulated} to {sent}")
