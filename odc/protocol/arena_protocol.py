"""The protocol of an arena: every store of its words and every wait for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from odc.memory import Words
from odc.protocol.grid import RankGrid
from odc.protocol.protocol import MemberProtocol
from odc.protocol.words import ARENA_TABLE, ARENA_TAKEN, EntryWord, Word
from odc.trace import MAIN

_COPIED = "arena/copied"


class AbsentMember(Exception):
    """A member that was to put something takes no part any more; see `ArenaWords`."""


class ArenaWords:
    """The words of an arena, whose entries are ragged and have no epochs: steps of a channel rise instead.

        put     wait: the readers' COPIED >= the channel's last step | write | OFFSET, NBYTES, SIGNATURE | STEP
        get     COPIED of the step before | wait: the owner's STEP | copy | COPIED, on the owner

    COPIED of a channel and a reader is the last step that the reader has copied, or skipped; the reader alone writes
    it. It calls for the steps of an owner's channel on one thread at a time, each when its copies of the last are over.
    `channel` is a number, `reader` and `owner` are members.

    `absent(member)` is whether a member will put and copy nothing more.

    `lane` is the waiting thread's in the trace. Only waits of the training thread are on the board: while another one
    waits, the rank may compute.

    Over hosts an owner's entry is pushed to the hosts of its readers, and a reader keeps COPIED of a remote owner
    itself, as TAKEN of the channel and the owner, and pushes it to the owner's host.
    """

    def __init__(self, protocol: MemberProtocol, absent: Callable[[int], bool] = lambda member: False) -> None:
        self._protocol, self._heap, self._grid = protocol, protocol.layout.heap, protocol.grid
        self.absent = absent

    @staticmethod
    def requests(channels: int, grid: RankGrid) -> list[tuple[str, int]]:
        """Regions of words that a heap with an arena needs, and their bytes."""
        table, copied, hosts = 8 * len(EntryWord) * channels, 8 * channels * len(grid.ranks), grid.host_count - 1
        mirrors = [(f"mirror/{ARENA_TABLE}", hosts * table), (f"mirror/{ARENA_TAKEN}", hosts * copied)]
        requests = [(ARENA_TABLE, table), (_COPIED, copied)]
        return [*requests, (ARENA_TAKEN, copied), *mirrors] if hosts else requests

    def await_copied(self, channel: int, step: int, reader: int, what: str, lane: str = MAIN) -> None:
        """Wait until `reader` has copied this rank's entry of `step`, or is absent; errors name `what`."""

        def settled() -> bool:
            return self.copied(channel, step, reader) or self.absent(reader)

        if self._grid.is_remote(reader):
            self._protocol.layout.remote(reader).attach()
        self._await(settled, reader, what, lane, "COPIED")

    def copied(self, channel: int, step: int, reader: int) -> bool:
        """Whether `reader` needs this rank's entry of `step` no more. Does not wait."""
        members = len(self._grid.ranks)
        if self._grid.is_remote(reader):
            peer = self._protocol.layout.remote(reader)
            return peer.attached and peer.mirrored(ARENA_TAKEN).load(channel * members + self._grid.me) >= step
        return self._heap.words(self._grid.me, _COPIED).load(channel * members + reader) >= step

    def awaits(self, channel: int, step: int, reader: int) -> bool:
        """Whether a reader on another host has yet to copy this rank's entry, as far as is known. Does not wait."""
        if not self._grid.is_remote(reader) or self.absent(reader):
            return False
        peer = self._protocol.layout.remote(reader)
        ended = not peer.attached or peer.board.load(Word.LEFT) or peer.board.load(Word.ABORT)
        return not ended and not self.copied(channel, step, reader)

    def show(self, channel: int, step: int, offset: int, nbytes: int, signature: int, readers: Sequence[int]) -> None:
        """STEP: the entry, which lies at `offset` of this rank's arena, is written."""
        words, base = self._heap.words(self._grid.me, ARENA_TABLE), len(EntryWord) * channel
        words.store(base + EntryWord.OFFSET, offset)
        words.store(base + EntryWord.NBYTES, nbytes)
        words.store(base + EntryWord.SIGNATURE, signature)
        board = self._protocol.board
        if step > board.load(Word.PUBLISHED):
            board.store(Word.PUBLISHED, step)  # for messages: the newest step
        words.store(base + EntryWord.STEP, step)  # release: the bytes and the words above are visible before it
        for host in sorted({self._grid.host(reader) for reader in readers if self._grid.is_remote(reader)}):
            self._protocol.sink.send_words(host, ARENA_TABLE, base, (step, offset, nbytes, signature))

    def await_entry(
        self, channel: int, step: int, owner: int, what: str, lane: str = MAIN
    ) -> tuple[int, int, int, int]:
        """Wait until `owner` shows `step` or a later one; returns its step, offset, bytes and signature.

        Raises AbsentMember if it will not: what it showed before it was absent is returned all the same.
        """
        words, base = self._entries(owner), len(EntryWord) * channel

        def shown() -> bool:
            return words.load(base + EntryWord.STEP) >= step

        def settled() -> bool:
            return shown() or self.absent(owner)

        if not shown():
            self.done(channel, step - 1, owner)  # a skipped entry holds up no put: no earlier one is read any more
        self._await(settled, owner, what, lane, "STEP")
        if not shown():
            raise AbsentMember
        found = words.load(base + EntryWord.STEP)  # acquires what the owner stored before it
        offset, nbytes = words.load(base + EntryWord.OFFSET), words.load(base + EntryWord.NBYTES)
        return found, offset, nbytes, words.load(base + EntryWord.SIGNATURE)

    def signature(self, channel: int, owner: int) -> int:
        """SIGNATURE of the entry that `owner` shows, or is about to; 0 before its first."""
        return self._entries(owner).load(len(EntryWord) * channel + EntryWord.SIGNATURE)

    def _await(self, settled: Callable[[], bool], member: int, what: str, lane: str, word: str) -> None:
        text = f"rank {self._grid.ranks[member]} {what}"
        self._protocol.waiter.until(settled, member, text, lane=lane, word=word, noted=lane == MAIN)

    def _entries(self, owner: int) -> Words:
        if self._grid.is_remote(owner):
            return self._protocol.layout.remote(owner).mirrored(ARENA_TABLE)
        return self._heap.words(owner, ARENA_TABLE)

    def done(self, channel: int, step: int, owner: int) -> None:
        """COPIED, or TAKEN: this rank has copied what it needs of the owner's entry."""
        members = len(self._grid.ranks)
        if self._grid.is_remote(owner):
            at = channel * members + owner
            self._heap.words(self._grid.me, ARENA_TAKEN).store(at, step)
            self._protocol.sink.send_words(self._grid.host(owner), ARENA_TAKEN, at, (step,))
        else:
            words = self._heap.words(owner, _COPIED)
            words.store(channel * members + self._grid.me, step)  # release: the copies are over
