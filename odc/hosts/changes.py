"""How a shard of a member on another node comes into the node's cache: not at all, as its changes, or whole.

Changes are applied to the cache, in CPU memory or on its device, where they come: see `HeapLayout.patch`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from odc.errors import OdcError
from odc.protocol.changes import checksum, running_mean
from odc.protocol.heap_reader import HeapRead, HeapReader, PassingRead
from odc.protocol.peers.remote import NodeShare
from odc.protocol.protocol import MemberProtocol
from odc.protocol.units import UnitSpec
from odc.protocol.words import Version, Word
from odc.trace import FETCH, recorder

LANE = "hosts"  #: of a trace: reads from other hosts, whichever thread does them
# Shards that are timed together, and their bytes, at least. Two reads are in progress, so fewer shards seem slow; fewer
# bytes say more of the way there, and of what a link lets pass at once, than of the link.
_TIMED_SHARDS, _TIMED_BYTES = 4, 1 << 20
_WINDOW = 4  # epochs


@dataclass
class _Tally:
    """Of one call: bytes that were read, and that were not. Of whole shards that are timed together: when the first
    one's read began, how many they are, and their bytes.
    """

    nbytes: int = 0
    saved: int = 0
    begun: float = 0.0
    shards: int = 0
    timed: int = 0


class ShardReads:
    """Brings shards into the cache of this node. For the rank that has claimed them, on any of its threads."""

    def __init__(self, protocol: MemberProtocol, heaps: HeapReader) -> None:
        self._protocol, self._layout, self._heaps = protocol, protocol.layout, heaps
        self._paces: dict[int, float] = {}  # by window of epochs, the newest and the one before: seconds a byte
        self._patching: dict[int, float] = {}  # by unit: seconds of a patch, a running mean

    def seconds(self, nbytes: int) -> float:
        """How long a read of so many bytes from another host takes, by the fastest of late; 0.0 while none is known."""
        return nbytes * min(self._paces.values(), default=0.0)

    def patching(self, unit: int) -> float:
        """How long it takes to apply what has changed of a unit's shard, as measured; 0.0 while nothing was applied."""
        return self._patching.get(unit, 0.0)

    def bring(self, claimed: Iterable[tuple[NodeShare, UnitSpec]], epoch: int) -> None:
        """Return when the cache has the versions of `epoch`, and each is CACHED. Raises as `HeapReader.read_all`."""
        traced, tally = recorder().now_on(LANE), _Tally()

        def reads() -> Iterator[HeapRead | PassingRead]:
            for peer, unit in claimed:
                one = self._read_of(peer, unit, epoch, tally)
                nbytes = 0 if one is None else one.nbytes
                tally.nbytes += nbytes
                tally.saved += unit.published_bytes - nbytes
                if one is not None:
                    yield one

        self._heaps.read_all(reads())
        self._note_pace(epoch, tally)
        if tally.saved:
            self._protocol.count(Word.SAVED, tally.saved)
        if tally.nbytes or tally.saved:
            recorder().add(FETCH, traced, unit=f"{tally.saved} bytes saved", nbytes=tally.nbytes, lane=LANE)

    def bring_whole(self, peer: NodeShare, unit: UnitSpec, epoch: int) -> None:
        """The same, where a process may be at it that has left the job: what it writes is the same, or not used."""
        with peer.claim_mutex(unit).held(self._layout.settings.timeout_s):
            if peer.cached(unit).load(0) < epoch:
                self._heaps.read_all([self._whole(peer, unit, epoch, _Tally())])
                _announce(peer, unit, epoch)

    def _read_of(self, peer: NodeShare, unit: UnitSpec, epoch: int, tally: _Tally) -> HeapRead | PassingRead | None:
        """What brings the shard; None if it is there, and now CACHED."""
        have, version = peer.cached(unit).load(0), self._version(peer, unit)
        if version is None or not have:
            return self._whole(peer, unit, epoch, tally, version)
        if have >= version.changed:
            _announce(peer, unit, epoch)
            return None
        if version.packed < 0 or have < version.base or not self._layout.applies_changes:
            return self._whole(peer, unit, epoch, tally, version)
        use = functools.partial(self._patch, peer, unit, epoch, version)
        what = f"the changes of unit {unit.name!r}"
        return PassingRead(peer.member, f"changes/{unit.index}", version.place, version.packed, what, use)

    def _version(self, peer: NodeShare, unit: UnitSpec) -> Version | None:
        """None where the owner says nothing of versions."""
        layout = self._layout
        if not layout.says_changes or not layout.grid.is_remote(peer.member):
            return None
        words = layout.remote(peer.member).versions(unit)
        return Version(*(words.load(i) for i in range(len(Version._fields))))

    def _whole(
        self, peer: NodeShare, unit: UnitSpec, epoch: int, tally: _Tally, version: Version | None = None
    ) -> HeapRead:
        begun = time.perf_counter()

        def then() -> None:
            if self._layout.grid.is_remote(peer.member):  # what is copied within this machine says nothing of a link
                self._note_read(unit, epoch, begun, tally)
            self._check(peer, unit, version)
            _announce(peer, unit, epoch)

        offset = self._layout.buffer_offset(unit, epoch)
        return HeapRead(peer.member, f"published/{unit.index}", offset, _place(peer, unit), f"unit {unit.name!r}", then)

    def _note_read(self, unit: UnitSpec, epoch: int, begun: float, tally: _Tally) -> None:
        """Of a whole shard, which has come."""
        if not tally.shards:
            tally.begun = begun
        tally.shards, tally.timed = tally.shards + 1, tally.timed + unit.published_bytes
        if tally.shards >= _TIMED_SHARDS:
            self._note_pace(epoch, tally)

    def _note_pace(self, epoch: int, tally: _Tally) -> None:
        """Of the shards that were timed. The fastest of a window counts: others have waited for processors, a
        connection, patches or other ranks.
        """
        if tally.timed >= _TIMED_BYTES:
            window, pace = epoch // _WINDOW, (time.perf_counter() - tally.begun) / tally.timed
            kept = {of: fastest for of, fastest in self._paces.items() if of >= window - 1}
            self._paces = {**kept, window: min(pace, kept.get(window, pace))}
            tally.shards = tally.timed = 0

    def _patch(self, peer: NodeShare, unit: UnitSpec, epoch: int, version: Version, packed: torch.Tensor) -> None:
        # A patch must be applied once: a rank that has given up on this one reads the whole shard, under the lock too.
        with peer.claim_mutex(unit).held(self._layout.settings.timeout_s):
            if peer.cached(unit).load(0) < epoch:
                peer.cached(unit).store(0, 0)  # until `_announce`: after an error in between it is read whole
                patching = time.perf_counter()
                self._layout.patch(unit, _place(peer, unit), packed)
                self._note_patch(unit, time.perf_counter() - patching)
                self._check(peer, unit, version)
                _announce(peer, unit, epoch)

    def _note_patch(self, unit: UnitSpec, seconds: float) -> None:
        """A faster one counts at once: the slower ones had waited for other work of the device."""
        before = self.patching(unit.index)
        self._patching[unit.index] = min(seconds, running_mean(before, seconds))

    def _check(self, peer: NodeShare, unit: UnitSpec, version: Version | None) -> None:
        if version is not None and version.checksum and checksum(_place(peer, unit)) != version.checksum:
            raise OdcError(
                f"rank {self._layout.grid.rank} (epoch {self._protocol.epoch}): the shard of unit {unit.name!r} of "
                f"rank {peer.rank} is not what that rank has published"
            )


def _place(peer: NodeShare, unit: UnitSpec) -> torch.Tensor:
    """uint8 [unit.published_bytes], in the cache."""
    return peer.published_bytes(unit)[: unit.published_bytes]


def _announce(peer: NodeShare, unit: UnitSpec, epoch: int) -> None:
    cached = peer.cached(unit)
    cached.store(0, epoch)  # release: the shard is there
    cached.wake(0)
