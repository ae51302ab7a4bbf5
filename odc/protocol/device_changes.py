"""What this rank's published shards have changed by, where they lie on a device: packed there, and read from there.

Kernels publish and pack all units at once. How much they have packed comes to the host by one copy behind them, which
the wait for the published shards covers: nothing waits for a size. `HeapLayout.patch` is the other end.

Under `changes="auto"` they always pack: that reads a published shard once more than publishing does, where the step of
the optimizer before it has moved several times as many bytes of that shard. What may not pay is the wait of a patch.

How much there is to write is known only when it is written. So a unit's changes have all of its region, or, while they
are few, one of its equal slots, of which there are as many as versions are kept for readers outside the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from odc.movers.choice import device_mover
from odc.movers.plans import PackedUnit
from odc.protocol.changes import PROBE_EVERY, SAMPLE_EVERY, SLACK, WHOLE, PublishedChanges, forget, note_version
from odc.protocol.protocol import MemberProtocol
from odc.protocol.units import UnitSpec
from odc.protocol.words import VERSIONS_KEPT

_MOST_BYTES = 6 << 30  # of a unit's shard: kernels count what they pack of it in 32 bits


class ReadTimes(Protocol):
    """What reads from other hosts have taken on this rank, which stands for those of other hosts from it."""

    def seconds(self, nbytes: int) -> float:
        """Of a read of so many bytes; 0.0 while nothing was read."""

    def patching(self, unit: int) -> float:
        """Of applying what has changed of a unit's shard; 0.0 while nothing was applied."""


class DeviceChanges:
    """As `PublishedChanges`, on a device; on the rank's main thread. Where kernels do not work, every version is
    read whole. `times`: if this rank reads from other hosts.
    """

    def __init__(self, protocol: MemberProtocol, times: ReadTimes | None) -> None:
        self._protocol, self._layout, self._times = protocol, protocol.layout, times
        self._always = self._layout.settings.changes == "on"
        # By unit: how many versions, one after the other, were to be read whole, as that was faster.
        self._passed: dict[int, int] = {}
        self._changed = 0  # epochs that have changed something
        # By unit: where its newest changes were written, and where the next ones are.
        self._places, self._rooms = [range(0)] * len(self._layout.units), [range(0)] * len(self._layout.units)
        self._whole = False  # of the epoch that is being published
        device, count = self._layout.heap.device, max(1, len(self._layout.units))
        # Of each unit a quarter of its records' bytes: where kernels add them up, and where the host reads them.
        self._found = torch.zeros(count, dtype=torch.int32, device=device)
        self._sizes = torch.zeros(count, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")

    def publish(self, shards: Sequence[Sequence[torch.Tensor]], epoch: int, whole: bool) -> None:
        """Publish the shards, by unit and parameter; `whole`: other hosts are to read all of them. Does not wait."""
        self._whole = whole
        units = zip(self._layout.units, shards, strict=True)
        mover = device_mover(self._layout.mover)
        if not self._layout.applies_changes:
            mover.publish(self._layout.published(epoch), [shard for tensors in shards for shard in tensors])
            return
        mover.zero([self._found])
        mover.pack([self._packed(unit, tensors, epoch) for unit, tensors in units], self._found)
        with torch.cuda.device_of(self._found):
            mover.put(self._sizes.data_ptr(), self._found.data_ptr(), self._sizes.nbytes)

    def _packed(self, unit: UnitSpec, shards: Sequence[torch.Tensor], epoch: int) -> PackedUnit:
        mine, params = self._layout.mine, range(len(unit.params))
        places = [mine.published(unit, i, epoch) for i in params]
        before = [mine.published(unit, i, epoch - 1) for i in params]
        room = self._rooms[unit.index] = _room(self._places[unit.index], most_packed(unit))
        return places, before, shards, mine.changes(unit)[room.start : room.stop]

    def note(self, epoch: int) -> None:
        """Store the words of what has changed; what `publish` has asked for has settled.

        The directory was written also where nothing has changed, and of too many records as many as there is room for.
        A host that has not read what they have overwritten reads the whole shard.
        """
        units = self._layout.units
        if not self._layout.applies_changes:
            for unit in units:
                note_version(self._protocol, unit, WHOLE, 0, epoch)
            return
        records = [4 * words for words in self._sizes.tolist()]
        ends = [
            room.start + patches.directory_bytes + nbytes
            for room, patches, nbytes in zip(self._rooms, self._layout.patches, records, strict=False)
        ]
        written = [range(room.start, min(end, room.stop)) for room, end in zip(self._rooms, ends, strict=True)]
        forget(self._layout.mine.history(), written)
        for unit, place, end, nbytes in zip(units, written, ends, records, strict=False):
            countable = unit.published_bytes <= _MOST_BYTES and not self._whole
            if nbytes or not countable:
                readable = countable and end == place.stop and self._pays(unit, len(place))
                note_version(self._protocol, unit, len(place) if readable else WHOLE, place.start, epoch)
                self._places[unit.index] = place
        self._changed += any(records) or self._whole

    def _pays(self, unit: UnitSpec, packed: int) -> bool:
        """Whether other hosts are to read the changes: under "auto", if they are read and applied sooner than the shard
        is read. Every eighth time they are applied anyway, so that it is known what that takes, and one epoch in
        `PROBE_EVERY` is read whole, so that it is known what a read takes.
        """
        if self._always or self._times is None:
            return self._always
        passed = self._passed.get(unit.index, 0) + 1
        applied = self._times.patching(unit.index) if passed < SAMPLE_EVERY else 0.0
        faster = self._times.seconds(packed) + applied < self._times.seconds(unit.published_bytes)
        pays = faster and self._changed % PROBE_EVERY != 0
        self._passed[unit.index] = 0 if pays else passed
        return pays


def _room(newest: range, most: int) -> range:
    """Where a unit's next changes are written: behind the newest ones, where they are expected to fit a slot."""
    slot = most // VERSIONS_KEPT // 4 * 4
    if not newest or SLACK * len(newest) > slot:
        return range(most)
    begin = (newest.start // slot + 1) % VERSIONS_KEPT * slot
    return range(begin, begin + slot)


def most_packed(unit: UnitSpec) -> int:
    """Bytes of changes that are worth reading in place of the shard: three quarters of it, of whole words."""
    return unit.published_bytes * 3 // 16 * 4


def changes_of(protocol: MemberProtocol, times: ReadTimes | None) -> PublishedChanges | DeviceChanges | None:
    """What publishes the shards of a member whose heap says changes, else None. `times`: if it reads from other
    hosts.
    """
    layout = protocol.layout
    if not layout.says_changes:
        return None
    if layout.heap.lanes.asynchronous:
        return DeviceChanges(protocol, times)
    return PublishedChanges(protocol, _no_reads if times is None else times.seconds)


def _no_reads(nbytes: int) -> float:
    """How long a read from another host takes where this rank reads from none: that is not known."""
    return 0.0
