"""The protocol of an arena: every store of its words and every wait for one."""

from __future__ import annotations

from collections.abc import Callable

from odc.runtime.protocol import MemberProtocol
from odc.runtime.words import EntryWord, Word


class AbsentMember(Exception):
    """A member that was to put something takes no part any more; for who has set `ArenaWords.absent` to catch."""


class ArenaWords:
    """The words of an arena, whose entries are ragged and have no epochs: steps of a channel rise instead.

        put     wait: the readers' COPIED >= the channel's last step | write | OFFSET, NBYTES, SIGNATURE | STEP
        get     wait: the owner's STEP | copy | COPIED, on the owner

    COPIED of a channel and a reader says up to which step that reader has copied it; the reader alone writes it.
    `channel` is a number, `reader` and `owner` are members.
    """

    TABLE, COPIED = "arena/table", "arena/copied"

    def __init__(self, protocol: MemberProtocol) -> None:
        self._protocol, self._heap, self._grid = protocol, protocol.layout.heap, protocol.grid
        self.absent: Callable[[int], bool] = lambda member: False  # whether a member will put and copy nothing more

    @classmethod
    def nbytes(cls, channels: int, members: int) -> dict[str, int]:
        """Regions of words that a heap with an arena needs."""
        return {cls.TABLE: 8 * len(EntryWord) * channels, cls.COPIED: 8 * channels * members}

    def await_copied(self, channel: int, step: int, reader: int, what: str) -> None:
        """Wait until `reader` has copied this rank's entry of `step`, or is absent; `what` is said after its rank."""

        def settled() -> bool:
            return self.copied(channel, step, reader) or self.absent(reader)

        self._protocol.waiter.until(settled, reader, f"rank {self._grid.ranks[reader]} {what}")

    def copied(self, channel: int, step: int, reader: int) -> bool:
        """Whether `reader` needs this rank's entry of `step` no more."""
        words = self._heap.words(self._grid.me, self.COPIED)
        return words.load(channel * len(self._grid.ranks) + reader) >= step

    def show(self, channel: int, step: int, offset: int, nbytes: int, signature: int) -> None:
        """STEP: the entry, which lies at `offset` of this rank's arena, is written."""
        words, base = self._heap.words(self._grid.me, self.TABLE), len(EntryWord) * channel
        words.store(base + EntryWord.OFFSET, offset)
        words.store(base + EntryWord.NBYTES, nbytes)
        words.store(base + EntryWord.SIGNATURE, signature)
        board = self._protocol.board
        board.store(Word.PUBLISHED, max(step, board.load(Word.PUBLISHED)))  # for messages: the newest step
        words.store(base + EntryWord.STEP, step)  # release: the bytes and the words above are visible before it

    def await_entry(self, channel: int, step: int, owner: int, what: str) -> tuple[int, int, int, int]:
        """Wait until `owner` shows `step` or a later one; returns its step, offset, bytes and signature.

        Raises AbsentMember if it will not: what it showed before it was absent is returned all the same.
        """
        words, base = self._heap.words(owner, self.TABLE), len(EntryWord) * channel

        def shown() -> bool:
            return words.load(base + EntryWord.STEP) >= step

        def settled() -> bool:
            return shown() or self.absent(owner)

        self._protocol.waiter.until(settled, owner, f"rank {self._grid.ranks[owner]} {what}")
        if not shown():
            raise AbsentMember
        found = words.load(base + EntryWord.STEP)  # acquires what the owner stored before it
        offset, nbytes = words.load(base + EntryWord.OFFSET), words.load(base + EntryWord.NBYTES)
        return found, offset, nbytes, words.load(base + EntryWord.SIGNATURE)

    def signature(self, channel: int, owner: int) -> int:
        """SIGNATURE of the entry that `owner` shows, or is about to; 0 before its first."""
        return self._heap.words(owner, self.TABLE).load(len(EntryWord) * channel + EntryWord.SIGNATURE)

    def done(self, channel: int, step: int, owner: int) -> None:
        """COPIED: this rank has copied what it needs of the owner's entry."""
        words = self._heap.words(owner, self.COPIED)
        words.store(channel * len(self._grid.ranks) + self._grid.me, step)  # release: the copies are over
