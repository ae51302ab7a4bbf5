"""What this rank's published shards have changed by, for hosts that keep a version before (docs/changes.md).

Publishing compares each unit with what was published last. What has changed is packed beside the shards. The words of
a unit, which cross to other hosts before PUBLISHED, say what a reader has to read: nothing, the changes, or the whole
shard. They name versions by the epochs that brought them, so an epoch that changes nothing costs no byte.

A unit's region of changes is a ring: those of the newest versions lie one after the other, until the next ones are
written over them. Ranks read the newest only; readers outside the job, which skip versions, read all since their own.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from odc.errors import UnsupportedError, install
from odc.memory import round_up
from odc.movers import changes
from odc.protocol.protocol import MemberProtocol
from odc.protocol.units import UnitSpec
from odc.protocol.words import VersionWord

WHOLE = changes.TOO_LARGE
SAMPLE_EVERY = 8  # versions of a unit
PROBE_EVERY = 64  # epochs that change something: one is read whole, which measures the link
_SAMPLED = 256 << 10  # bytes
_TIMED_BYTES = 64 << 10  # fewer say more of the call than of a byte
_FIRST_BYTES = 8 << 10
SLACK = 1.25  # of the last changes: so much room the next ones are expected to take
_MARGIN = 3  # times packing: a patch takes as long at most, and compute hides a part of a read, but nothing of both
_LEAST = 4096  # elements of a parameter, or words of a shard, that are compared before the others are


class PublishedChanges:
    """The changes of one rank's published shards, in CPU memory; `DeviceChanges` are those on a device. On the rank's
    main thread, between its words PUBLISHING and PUBLISHED: `publish`, and when that has settled `note`.

    `seconds(nbytes)`: how long another host's read of so many bytes takes, 0.0 while that is not known.
    """

    def __init__(self, protocol: MemberProtocol, seconds: Callable[[int], float]) -> None:
        self._protocol, self._layout, self._seconds = protocol, protocol.layout, seconds
        layout, self._always = self._layout, self._layout.settings.changes == "on"
        if self._always and not changes.available():
            raise UnsupportedError(
                f"Settings(changes='on') packs by numba, which is not installed or does not load: {install('fast')}"
            )
        largest = max((unit.published_bytes for unit in layout.units), default=0)
        self._scratch = torch.zeros(largest if layout.buffers == 1 else 0, dtype=torch.uint8, device="cpu")
        self._gaps = [_gaps(unit) for unit in layout.units]
        self._sample = torch.empty(changes.room_for(_SAMPLED), dtype=torch.uint8, device="cpu")
        # By unit: bytes packed over those of the shard, or of a sample, when last packed; where the newest changes lie.
        self._ratios: dict[int, float] = {}
        self._places: dict[int, range] = {}
        self._versions = [0] * len(layout.units)  # by unit: how many have been published
        self._changed = 0  # epochs that have changed something
        self._found: list[tuple[UnitSpec, int]] = []  # in this epoch changed units, and their packed bytes
        # Processor seconds of packing a byte, running means: of calls with less than `_TIMED_BYTES`, and with more.
        self._paces = [0.0, 0.0]

    def publish(self, shards: Sequence[Sequence[torch.Tensor]], epoch: int, whole: bool) -> None:
        """Publish the shards, by unit and parameter; `whole`: other hosts are to read all of them."""
        self._found.clear()
        for unit, tensors in zip(self._layout.units, shards, strict=True):
            packed = self._publish(unit, tensors, epoch, whole)
            if packed:
                self._found.append((unit, packed))

    def note(self, epoch: int) -> None:
        """Store the words of what has changed."""
        for unit, packed in self._found:
            place = 0 if packed == WHOLE else self._places[unit.index].start
            note_version(self._protocol, unit, packed, place, epoch)
            self._versions[unit.index] += 1
        self._changed += bool(self._found)

    def _publish(self, unit: UnitSpec, shards: Sequence[torch.Tensor], epoch: int, whole: bool) -> int:
        """Bytes of the changes, which lie in their region then; 0: there are none; WHOLE: they are not to be read."""
        mine, versions = self._layout.mine, self._layout.mine.versions(unit)
        place, old = mine.published_bytes(unit, epoch), mine.published_bytes(unit, epoch - 1)
        place, old = place[: unit.published_bytes], old[: unit.published_bytes]
        comparable, declines = versions.load(VersionWord.CHANGED) and not whole, self._declines(unit)
        at_once = self._layout.buffers == 2 or not comparable or (declines and _differs(unit, place, shards))
        new = place if at_once else self._scratch[: unit.published_bytes]
        self._layout.mover.publish([_view(new, unit, i) for i in range(len(unit.params))], shards)
        if new is place and self._layout.buffers == 1:
            return WHOLE
        for begin, end in self._gaps[unit.index]:  # another unit may have written there
            new[begin:end].zero_()
        packed = self._packed(unit, old, new, declines) if comparable else WHOLE
        if packed and new is not place:
            place.copy_(new)
        return packed

    def _packed(self, unit: UnitSpec, old: torch.Tensor, new: torch.Tensor, declines: bool) -> int:
        """Bytes of the changes, which lie in their region then; 0 if there are none, WHOLE if they do not pay."""
        if not new.numel() or _equal(old, new):
            return 0
        if declines:
            return WHOLE
        if not self._always and self._due(unit):
            self._take_sample(unit, old, new)
        return self._pack(unit, old, new) if self._always or self._pays(unit) else WHOLE

    def _take_sample(self, unit: UnitSpec, old: torch.Tensor, new: torch.Tensor) -> None:
        """Time the packing of some bytes, others at each turn of the unit."""
        whole, turn = unit.published_bytes, self._versions[unit.index] // SAMPLE_EVERY
        begin = min(turn * _SAMPLED % whole, max(0, whole - _SAMPLED))
        old, new = old[begin : begin + _SAMPLED], new[begin : begin + _SAMPLED]
        if whole > _SAMPLED:
            # After a step the code is in no cache: the first call takes 0.1 ms more, by which a sample would seem
            # several times slower than the unit.
            changes.pack(old[:_FIRST_BYTES], new[:_FIRST_BYTES], self._sample)
        self._timed(unit, old, new, self._sample)

    def _declines(self, unit: UnitSpec) -> bool:
        """Whether a version that has changed is read whole, which is known before it is looked at."""
        if self._always:
            return False
        unknown = not changes.available() or not self._seconds(unit.published_bytes)
        return unknown or not (self._due(unit) or self._pays(unit))

    def _due(self, unit: UnitSpec) -> bool:
        """Whether a sample is to be packed. Units take turns."""
        return unit.index not in self._ratios or (self._versions[unit.index] - unit.index) % SAMPLE_EVERY == 0

    def _pays(self, unit: UnitSpec) -> bool:
        """Whether reading the changes, packed here and applied there, is likely to be faster than reading the shard."""
        whole, (few, many) = unit.published_bytes, self._paces
        saved = self._seconds(whole) - self._seconds(int(whole * self._ratios[unit.index]))
        return self._changed % PROBE_EVERY != 0 and saved > _MARGIN * (many or few) * whole

    def _pack(self, unit: UnitSpec, old: torch.Tensor, new: torch.Tensor) -> int:
        """Pack behind the last changes where the next ones are expected to fit, else at the start of the region."""
        room, last = self._layout.mine.changes(unit), self._places.pop(unit.index, range(0))
        behind = round_up(last.stop, 4)
        for place in (behind, 0) if last and behind + SLACK * len(last) <= len(room) else (0,):
            size = self._timed(unit, old, new, room[place:])
            written = range(place, len(room) if size == WHOLE else place + size)
            forget(self._layout.mine.history()[:, unit.index : unit.index + 1], [written])
            if size != WHOLE:
                self._places[unit.index] = written
                return size
        return WHOLE

    def _timed(self, unit: UnitSpec, old: torch.Tensor, new: torch.Tensor, into: torch.Tensor) -> int:
        """As `changes.pack`; notes what it took, and how much it was."""
        changes.prepare()
        begin = time.thread_time()
        size = changes.pack(old, new, into)
        pace, many = (time.thread_time() - begin) / new.numel(), new.numel() >= _TIMED_BYTES
        self._paces[many] = running_mean(self._paces[many], pace)
        self._ratios[unit.index] = 1.0 if size == WHOLE else size / new.numel()
        return size


def running_mean(before: float, now: float) -> float:
    """Of measurements; `before` is 0.0 at first."""
    return (3 * before + now) / 4 if before else now


def note_version(protocol: MemberProtocol, unit: UnitSpec, packed: int, place: int, epoch: int) -> None:
    """Store the words of a unit whose shard has changed in `epoch`, and been published; `packed` and `place` as of the
    words.
    """
    layout, checked = protocol.layout, 0
    if layout.settings.check_protocol:
        checked = checksum(layout.mine.published_bytes(unit, epoch)[: unit.published_bytes])
    protocol.note_version(unit, packed, place, checked)


def checksum(shard: torch.Tensor) -> int:
    """Of the bytes of a shard; never 0. On a device it waits for the current lane."""
    return 1 + zlib.crc32(shard.cpu().numpy().data)


def forget(history: np.ndarray, written: Sequence[range]) -> None:
    """Versions whose changes have been written over cannot be read any more. `history` is that of a `LocalPeer`, or a
    part of it; `written`, by unit, what was written of its region.
    """
    begin, end = np.array([[one.start, one.stop] for one in written], dtype=np.int64).reshape(-1, 2).T
    packed, place = history[..., VersionWord.PACKED], history[..., VersionWord.PLACE]
    packed[(packed > 0) & (place < end) & (place + packed > begin)] = WHOLE


def _view(memory: torch.Tensor, unit: UnitSpec, param: int) -> torch.Tensor:
    spec = unit.params[param]
    return memory[spec.published_offset : spec.published_offset + spec.nbytes].view(spec.dtype)


def _gaps(unit: UnitSpec) -> list[tuple[int, int]]:
    """Bytes of a published shard that belong to no parameter."""
    ends = [spec.published_offset + spec.nbytes for spec in unit.params]
    begins = [spec.published_offset for spec in unit.params[1:]] + [unit.published_bytes]
    return [(end, begin) for end, begin in zip(ends, begins, strict=False) if begin > end]


def _differs(unit: UnitSpec, place: torch.Tensor, shards: Sequence[torch.Tensor]) -> bool:
    """Whether the first elements of some parameter are not what lies in `place`, byte for byte. False says nothing of
    all others.
    """
    for i, shard in enumerate(shards):
        old = _view(place, unit, i)[:_LEAST]
        new = shard[:_LEAST].to(old.dtype).contiguous()
        if not torch.equal(old.view(torch.uint8), new.view(torch.uint8)):
            return True
    return False


def _equal(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether two versions are the same, byte for byte. Most that are not differ early."""
    words = old.view(torch.int64), new.view(torch.int64)
    return torch.equal(words[0][:_LEAST], words[1][:_LEAST]) and torch.equal(*words)
