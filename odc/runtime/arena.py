"""A declared piece of every rank's heap in which ragged data lies until all ranks that need it have copied it.

Its size is fixed when it is made, so an overflow raises an error that names the size needed. In a small arena fast
ranks wait for slow ones. A member with nothing to read neither waits nor is waited for. The words by which an owner and
its readers agree are `odc.protocol.arena_protocol.ArenaWords`.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from odc.errors import HeapMemoryError, OdcError, PeerLostError
from odc.memory import ShmHeap, round_up
from odc.net.announced import announce_process
from odc.net.store import JobStore
from odc.protocol.arena_protocol import AbsentMember, ArenaWords
from odc.protocol.grid import RankGrid
from odc.protocol.words import Word
from odc.runtime.connect import Rendezvous
from odc.runtime.daemon import refuse_losses
from odc.runtime.linking import locate
from odc.runtime.member import Member
from odc.settings import Settings
from odc.trace import MAIN

_ALIGN = 64
_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


@dataclass(frozen=True)
class ArenaEntry:
    """What a peer has put."""

    nbytes: int
    signature: int
    _part: Callable[[int, int], torch.Tensor]

    def part(self, first: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] from byte `first` on: a view of the owner's heap, or a copy where that is on another host.

        Raises as `RemoteHeaps.read` does.
        """
        return self._part(first, nbytes)

    @property
    def raw(self) -> torch.Tensor:
        """All of it."""
        return self.part(0, self.nbytes)


@dataclass
class _Slot:
    """What one channel's entry takes, on its owner."""

    step: int
    offset: int
    nbytes: int
    readers: list[int]


class Arena:
    """One rank's arena and its view of the others'. Channels may be used from several threads, each from one at a time.

    A peer is attached when it is first read from, or waited for. Ranks, bytes and channels are the same on every rank,
    and no other arena of these ranks has this name. `timeout_s` is how long a wait may last without progress of the
    peer it waits for. Raises HeapMemoryError if the arena does not fit into memory.

    Without `hosts` all ranks share this host, and construction does not wait. With it they may be on several, which
    equally many share; construction waits until every rank has called `fully_shard` or made such an arena, and raises
    as `locate` does. Of `hosts` address, ports, secret_file, engine and lost_after_s count, where this process
    has no listener yet.

    Of members for which `absent` holds none is waited for: they neither put nor read any more, and `get` raises
    AbsentMember. It has no side effect, is asked on the waiting thread, and does not hold this object.
    """

    def __init__(
        self,
        store: Any,
        ranks: Sequence[int],
        rank: int,
        nbytes: int,
        channels: Sequence[str],
        timeout_s: float,
        name: str,
        hosts: Settings | None = None,
        absent: Callable[[int], bool] = lambda member: False,
    ) -> None:
        watch = functools.partial(refuse_losses, f"rank {rank}, making an exchange")
        announce_process(job := JobStore(store, timeout_s, rank, watch=watch), rank)
        grid = RankGrid(tuple(ranks), len(ranks), list(ranks).index(rank))
        self.grid = grid = grid if hosts is None else locate(job, grid)
        self.channels = {channel: i for i, channel in enumerate(channels)}
        self.nbytes = round_up(nbytes, _ALIGN)
        identity = f"{name}.{hashlib.sha256(repr(grid.ranks).encode()).hexdigest()[:8]}"

        def open_heap(rendezvous: Rendezvous) -> ShmHeap:
            heap = ShmHeap(identity, grid.ranks, grid.me, rendezvous.connect, timeout_s)
            heap.allocate("arena", max(_ALIGN, self.nbytes))
            for region, size in ArenaWords.requests(len(channels), grid):
                heap.allocate(region, size, words=True)
            return heap

        network = hosts or Settings()
        settings = Settings(
            accumulate="direct",
            timeout_s=timeout_s,
            address=network.address,
            ports=network.ports,
            secret_file=network.secret_file,
            engine=network.engine,
            memory=network.memory,
            lost_after_s=network.lost_after_s,
            check_protocol=False,  # the table's rules are those of minibatches; an arena has steps
        )
        self._reached = threading.local()  # by the thread that waits, as several may
        check = functools.partial(_refuse_absent, self._reached, absent)
        member = Member(store, identity, grid, (), settings, "|".join(["arena-1", *channels]), open_heap, check)
        self._heap, self._protocol, self._remote = member.layout.heap, member.protocol, member.heaps
        self._words = ArenaWords(member.protocol, absent)
        self._lock = threading.Lock()
        self._slots: dict[int, _Slot] = {}
        self._member = member  # which must not hold this object
        self._unread_readers = functools.partial(_unread_by, self._slots, self._words)
        self._end = weakref.finalize(self, member.shut_down, unread=self._unread_readers)
        member.announce(f"arena_bytes={self.nbytes}, channels={list(channels)}")
        _arenas.add(self)

    def put(self, channel: str, step: int, nbytes: int, readers: Sequence[int], lane: str = MAIN) -> torch.Tensor:
        """Room for `nbytes` that other members will read, uint8 [nbytes], to be written and then shown by `show`.

        Waits until what the channel held is read, and until there is room. Steps of a channel rise. `lane` is the
        thread's in the trace.

        Raises:
            HeapMemoryError: it is larger than the whole arena; names the size that this entry needs.
            WaitTimeoutError, PeerLostError: a reader, which is named, has not read an earlier entry.
        """
        self.touch(f"putting {channel} of step {step}")
        number = self._number(channel)
        before = self._slots.get(number)
        if before is not None:
            if step <= before.step:
                raise OdcError(f"{self._who()}: {channel} was put for step {before.step} already, not only for {step}")
            self._await_readers(number, before, channel, lane)
        offset = self._reserve(_Slot(step, 0, nbytes, list(readers)), number, channel, lane)
        return self._heap.tensor(self.grid.me, "arena", torch.uint8, offset=offset, numel=nbytes)

    def show(self, channel: str, signature: int = 0) -> None:
        """Let readers have what was put: everything was written before."""
        number = self._number(channel)
        slot = self._slots[number]
        self._words.show(number, slot.step, slot.offset, slot.nbytes, signature, slot.readers)

    def _reserve(self, slot: _Slot, number: int, channel: str, lane: str) -> int:
        """Find room and note its entry; waits for readers while there is none."""
        needed = entry_bytes(slot.nbytes)
        if needed > self.nbytes:
            raise HeapMemoryError(
                f"{self._who()}: {channel} of step {slot.step} needs {needed} bytes, but the arena has {self.nbytes}; "
                f"declare arena_bytes={needed} or more, and if several threads put, room for their channels beside it"
            )
        while True:
            with self._lock:
                held = [(n, one) for n, one in self._slots.items() if n != number and self._unread(n, one)]
                offset = _gap([(one.offset, entry_bytes(one.nbytes)) for _, one in held], needed, self.nbytes)
                if offset is not None:
                    slot.offset = offset
                    self._slots[number] = slot
                    return offset
            total = needed + sum(entry_bytes(one.nbytes) for _, one in held)
            what = f"{channel} of step {slot.step} (with arena_bytes={total} this would not wait)"
            self._await_readers(*min(held, key=lambda one: one[0]), what, lane)

    def _await_readers(self, number: int, slot: _Slot, what: str, lane: str = MAIN) -> None:
        name = list(self.channels)[number]
        for reader in slot.readers:
            doing = f"to read {name} of step {slot.step}, to make room for {what}"
            self._words.await_copied(number, slot.step, reader, doing, lane)

    def _unread(self, number: int, slot: _Slot) -> bool:
        return not all(self._words.copied(number, slot.step, reader) for reader in slot.readers)

    def get(self, channel: str, step: int, owner: int, lane: str = MAIN) -> ArenaEntry:
        """What `owner` has put for this step; waits for it. Copy it, then call `done`. `lane` is as for `put`.

        Raises WaitTimeoutError or PeerLostError, naming the owner, if it did not put it; AbsentMember if it is absent.
        """
        number = self._number(channel)
        self.touch(f"reading {channel} of step {step}")
        if not self._protocol.layout.peer(owner).attached:
            self._reach(owner)
        found, offset, nbytes, signature = self._words.await_entry(
            number, step, owner, f"to put {channel} of step {step}", lane
        )
        if found != step:
            rank = self.grid.ranks[owner]
            raise OdcError(f"{self._who()}: rank {rank} has put {channel} of a step after {step}: plans differ")
        return ArenaEntry(nbytes, signature, functools.partial(self._part, owner, offset, f"{channel} of step {step}"))

    def _part(self, owner: int, offset: int, what: str, first: int, nbytes: int) -> torch.Tensor:
        if not self.grid.is_remote(owner):
            return self._heap.tensor(owner, "arena", torch.uint8, offset=offset + first, numel=nbytes)
        found = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._remote.read(owner, "arena", offset + first, found, what)
        return found

    def signature(self, channel: str, owner: int) -> int:
        """What `owner` shows, or is about to show, in a channel; 0 before its first entry. Does not wait."""
        attached = self._protocol.layout.peer(owner).attached
        return self._words.signature(self._number(channel), owner) if attached else 0

    def _reach(self, owner: int) -> None:
        """Attach to a member; waits until it has come up, or is absent."""
        self._reached.owner = owner
        try:
            self._protocol.layout.peer(owner).attach()
        finally:
            self._reached.owner = None

    def forget(self) -> None:
        """What this rank has put need not be read any more; the caller knows that no rank does."""
        with self._lock:
            for slot in self._slots.values():
                slot.readers = []

    def done(self, channel: str, step: int, owner: int) -> None:
        """This rank has copied what it needs of what `get` gave."""
        self._words.done(self._number(channel), step, owner)

    def touch(self, doing: str) -> None:
        """Note progress for ranks that wait for this one; raises `PeerLostError` if the job was aborted."""
        with self._lock:
            self._protocol.touch(doing)

    def refuse(self, reason: str, culprit: int | None = None) -> None:
        """End the exchange for all ranks, naming this rank or `culprit`, a global one."""
        self._protocol.abort(reason, self.grid.rank if culprit is None else culprit)

    def close(self, needed: bool = True) -> None:
        """Wait until all that was put is read, or its readers are gone, then shut down. Idempotent.

        `needed` is False where the caller knows that no member will read what was put, or attach to this arena, any
        more: then it waits for no rank of this host, even for a member that never made its arena.

        Raises WaitTimeoutError, naming a reader that did not read; this rank has shut down all the same.
        """
        if not needed:
            self.forget()
        if self._end.detach() is None:
            return
        try:
            for number, slot in self._slots.items():
                self._await_readers(number, slot, "the end of this exchange")
            if self.grid.remote:  # whose mirrors others of this host need until they shut down
                for member in self.grid.local:
                    self._protocol.layout.peer(member).attach()
        except PeerLostError:  # no rank will read it any more
            pass
        finally:
            wait = _leave(self._member, self._unread_readers, needed)
            if wait is not None and sys.exception() is None:  # a rank that ends with an error does not wait
                wait()

    def leave(self) -> None:
        """Shut down without waiting for readers of published entries; the daemon's release queue does. Idempotent."""
        if self._end.detach() is not None:
            _leave(self._member, self._unread_readers)

    def _number(self, channel: str) -> int:
        if channel not in self.channels:
            raise OdcError(f"{self._who()}: no channel {channel!r}; declared are {', '.join(self.channels)}")
        return self.channels[channel]

    def _who(self) -> str:
        return f"rank {self.grid.rank} (step {self._protocol.board.load(Word.PUBLISHED)})"


def _refuse_absent(reached: threading.local, absent: Callable[[int], bool]) -> None:
    """End the wait of a thread that attaches to a member, if that is absent."""
    owner = getattr(reached, "owner", None)
    if owner is not None and absent(owner):
        raise AbsentMember


def _unread_by(slots: dict[int, _Slot], words: ArenaWords) -> list[int]:
    """Members of other hosts that have still to read what lies in `slots`. Does not wait."""
    entries = [(number, slot.step, reader) for number, slot in list(slots.items()) for reader in slot.readers]
    return sorted({entry[2] for entry in entries if words.awaits(*entry)})


def _leave(member: Member, unread: Callable[[], list[int]], needed: bool = True) -> Callable[[], None] | None:
    """Shut an arena down. The error of a peer that waits for it in vain quotes the error that is being handled or
    has ended the program, and names the same culprit.
    """
    error = sys.exception() or getattr(sys, "last_value", None)
    note = "" if error is None else f"{type(error).__name__}: {error}"
    return member.shut_down(note, needed, error.culprit if isinstance(error, OdcError) else None, unread)


def abort_arenas(reason: str, culprit: int) -> None:
    """End all exchanges of this process on every rank that takes part, because of an error that ends it."""
    for arena in list(_arenas):
        arena.refuse(reason, culprit)


def leave_arenas() -> None:
    """Shut down all arenas of this process that are still open, or peers would wait for this rank in them."""
    for arena in list(_arenas):
        arena.leave()


def entry_bytes(nbytes: int) -> int:
    """The bytes of an arena that an entry of `nbytes` takes; an empty one takes some too."""
    return round_up(max(1, nbytes), _ALIGN)


def _gap(held: list[tuple[int, int]], needed: int, room: int) -> int | None:
    """The first offset with so many free bytes, among held (offset, bytes)."""
    end = 0
    for offset, nbytes in sorted(held):
        if offset - end >= needed:
            return end
        end = max(end, offset + nbytes)
    return end if room - end >= needed else None
