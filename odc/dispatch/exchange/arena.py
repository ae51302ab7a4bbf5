"""A declared piece of every rank's heap in which ragged data lies until all who need it have copied it.

The heap's size is fixed before, so an overflow raises and names the size that would have done. In a small arena fast
ranks wait for slow ones.

    owner    wait: the channel's last entry is read | find room | write | (offset, bytes, signature) | STEP (release)
    reader   wait: STEP >= its step | copy its rows | READ[channel, reader] on the owner = step (release)

STEP of a channel moves on only after every reader of the step before has stored READ, so a reader that sees its step
finds the entry as it was written; and it stores READ after its last copy. READ words have one writer each. A reader
with nothing to read neither waits nor is waited for.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from odc.errors import HeapMemoryError, OdcError, PeerLostError
from odc.memory import ShmHeap, Words
from odc.runtime import JobStore, KeyValueStore, Member, RankGrid, Rendezvous, Word, announce_process
from odc.settings import Settings

_STEP, _OFFSET, _NBYTES, _SIGNATURE, _ROW = range(5)
_ALIGN = 64


class ArenaEntry(NamedTuple):
    """What a peer has put."""

    raw: torch.Tensor  # uint8 [bytes], in the owner's heap
    signature: int


@dataclass
class _Slot:
    """What one channel's entry takes, on its owner."""

    step: int
    offset: int
    nbytes: int
    readers: list[int]


class Arena:
    """One rank's arena and its view of the others'. Channels may be used from several threads, each from one at a time.

    Construction waits for nobody; a peer is attached when it is first read from, or waited for. Ranks, bytes and
    channels are the same on every rank, and no other arena of these ranks has this name. `timeout_s` is how long a wait
    may last without progress of the peer it waits for. Raises HeapMemoryError if the arena does not fit into memory.
    """

    def __init__(
        self,
        store: KeyValueStore,
        ranks: Sequence[int],
        rank: int,
        nbytes: int,
        channels: Sequence[str],
        timeout_s: float,
        name: str,
    ) -> None:
        self.grid = grid = RankGrid(tuple(ranks), len(ranks), list(ranks).index(rank))
        self.channels = {channel: i for i, channel in enumerate(channels)}
        self.nbytes = -(-nbytes // _ALIGN) * _ALIGN
        identity = f"{name}.{hashlib.sha256(repr(grid.ranks).encode()).hexdigest()[:8]}"

        def open_heap(rendezvous: Rendezvous) -> ShmHeap:
            heap = ShmHeap(identity, grid.ranks, grid.me, rendezvous.connect, timeout_s)
            heap.allocate("arena", max(_ALIGN, self.nbytes))
            heap.allocate("arena/table", 8 * _ROW * len(channels))
            heap.allocate("arena/read", 8 * len(channels) * len(ranks))
            return heap

        settings = Settings(accumulate="direct", timeout_s=timeout_s)
        member = Member(store, identity, grid, (), settings, "|".join(["arena-1", *channels]), open_heap)
        self.layout, self._protocol, self.waiter = member.layout, member.protocol, member.protocol.waiter
        self._lock = threading.Lock()
        self._slots: dict[int, _Slot] = {}
        self._end = weakref.finalize(self, member.shut_down)  # holds the member, which must not hold this object
        announce_process(JobStore(store, timeout_s, rank), rank)
        member.announce(f"arena_bytes={self.nbytes}, channels={list(channels)}")

    def put(self, channel: str, step: int, nbytes: int, readers: Sequence[int]) -> torch.Tensor:
        """Room for `nbytes` that other members will read, uint8 [nbytes], to be written and then shown by `show`.

        Waits until what the channel held is read, and until there is room. Steps of a channel rise.

        Raises:
            HeapMemoryError: it is larger than the whole arena; names the size needed.
            WaitTimeoutError, PeerLostError: a reader, which is named, has not read an earlier entry.
        """
        self.touch(f"putting {channel} of step {step}")
        number = self._number(channel)
        before = self._slots.get(number)
        if before is not None:
            if step <= before.step:
                raise OdcError(f"{self._who()}: {channel} was put for step {before.step} already, not only for {step}")
            self._await_readers(number, before, channel)
        offset = self._reserve(_Slot(step, 0, nbytes, list(readers)), number, channel)
        return self.layout.heap.tensor(self.grid.me, "arena", torch.uint8, offset=offset, numel=nbytes)

    def show(self, channel: str, signature: int = 0) -> None:
        """Let readers have what was put: everything was written before."""
        number = self._number(channel)
        slot, table, base = self._slots[number], self._table(self.grid.me), _ROW * number
        table.store(base + _OFFSET, slot.offset)
        table.store(base + _NBYTES, slot.nbytes)
        table.store(base + _SIGNATURE, signature)
        self._protocol.show_step(slot.step)
        table.store(base + _STEP, slot.step)  # release: the bytes and the words above are visible before it

    def _reserve(self, slot: _Slot, number: int, channel: str) -> int:
        """Find room and note who has it; waits for readers while there is none."""
        needed = _up(slot.nbytes)
        if needed > self.nbytes:
            raise HeapMemoryError(
                f"{self._who()}: {channel} of step {slot.step} needs {needed} bytes, but the arena has {self.nbytes}; "
                f"declare arena_bytes={needed} or more"
            )
        while True:
            with self._lock:
                held = [(n, one) for n, one in self._slots.items() if n != number and self._unread(n, one)]
                offset = _gap([(one.offset, _up(one.nbytes)) for _, one in held], needed, self.nbytes)
                if offset is not None:
                    slot.offset = offset
                    self._slots[number] = slot
                    return offset
            total = needed + sum(_up(one.nbytes) for _, one in held)
            what = f"{channel} of step {slot.step} (with arena_bytes={total} this would not wait)"
            self._await_readers(*min(held, key=lambda one: one[0]), what)

    def _await_readers(self, number: int, slot: _Slot, what: str) -> None:
        read, name = self._read(self.grid.me), list(self.channels)[number]
        for member in slot.readers:
            word, rank = number * len(self.grid.ranks) + member, self.grid.ranks[member]

            def done(word: int = word) -> bool:
                return read.load(word) >= slot.step

            self.waiter.until(done, member, f"rank {rank} to read {name} of step {slot.step}, to make room for {what}")

    def _unread(self, number: int, slot: _Slot) -> bool:
        read, members = self._read(self.grid.me), len(self.grid.ranks)
        return any(read.load(number * members + reader) < slot.step for reader in slot.readers)

    def get(self, channel: str, step: int, owner: int) -> ArenaEntry:
        """What `owner` has put for this step; waits for it. Copy it, then call `done`.

        Raises WaitTimeoutError or PeerLostError, naming the owner, if it did not put it.
        """
        number = self._number(channel)
        self.touch(f"reading {channel} of step {step}")
        table, base = self._table(owner), _ROW * number
        rank = self.grid.ranks[owner]
        self.waiter.until(
            lambda: table.load(base + _STEP) >= step, owner, f"rank {rank} to put {channel} of step {step}"
        )
        if table.load(base + _STEP) != step:
            raise OdcError(f"{self._who()}: rank {rank} has put {channel} of a step after {step}: plans differ")
        offset, nbytes = table.load(base + _OFFSET), table.load(base + _NBYTES)
        raw = self.layout.heap.tensor(owner, "arena", torch.uint8, offset=offset, numel=nbytes)
        return ArenaEntry(raw, table.load(base + _SIGNATURE))

    def done(self, channel: str, step: int, owner: int) -> None:
        """This rank has copied what it needs of what `get` gave."""
        word = self._number(channel) * len(self.grid.ranks) + self.grid.me
        self._read(owner).store(word, step)  # release: the copies are over

    def touch(self, doing: str) -> None:
        """Note progress for those who wait for this rank; raises `PeerLostError` if the job was aborted."""
        with self._lock:
            self._protocol.touch(doing)

    def refuse(self, reason: str) -> None:
        """End the exchange for everybody, naming this rank."""
        self._protocol.abort(reason, self.grid.rank)

    def close(self) -> None:
        """Wait until all that was put is read, or its readers are gone, then shut down. Idempotent.

        Raises WaitTimeoutError, naming a reader that did not read; this rank has shut down all the same.
        """
        if not self._end.alive:
            return
        try:
            for number, slot in self._slots.items():
                self._await_readers(number, slot, "the end of this exchange")
        except PeerLostError:  # nobody will read it any more
            pass
        finally:
            wait = self._end()
            if wait is not None and sys.exception() is None:  # a rank that ends with an error waits for nobody
                wait()

    def _number(self, channel: str) -> int:
        if channel not in self.channels:
            raise OdcError(f"{self._who()}: no channel {channel!r}; declared are {', '.join(self.channels)}")
        return self.channels[channel]

    def _table(self, member: int) -> Words:
        return self.layout.heap.words(member, "arena/table")

    def _read(self, member: int) -> Words:
        return self.layout.heap.words(member, "arena/read")

    def _who(self) -> str:
        return f"rank {self.grid.rank} (step {self._protocol.board.load(Word.PUBLISHED)})"


def _up(nbytes: int) -> int:
    return -(-max(1, nbytes) // _ALIGN) * _ALIGN


def _gap(held: list[tuple[int, int]], needed: int, room: int) -> int | None:
    """The first offset with so many free bytes, among held (offset, bytes)."""
    end = 0
    for offset, nbytes in sorted(held):
        if offset - end >= needed:
            return end
        end = max(end, offset + nbytes)
    return end if room - end >= needed else None
