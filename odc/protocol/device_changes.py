"""What this rank's published shards have changed by, where they lie on a device: packed there, and read from there.

Kernels publish and pack all units at once. How much they have packed comes to the host by one copy behind them, which
the wait for the published shards covers: nothing waits for a size. `HeapLayout.patch` is the other end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from odc.movers.choice import device_mover
from odc.movers.plans import PackedUnit
from odc.protocol.changes import WHOLE, PublishedChanges, note_version
from odc.protocol.protocol import MemberProtocol
from odc.protocol.units import UnitSpec


class DeviceChanges:
    """As `PublishedChanges`, on a device; on the rank's main thread."""

    def __init__(self, protocol: MemberProtocol) -> None:
        self._protocol, self._layout = protocol, protocol.layout
        device, count = self._layout.heap.device, max(1, len(self._layout.units))
        # Of each unit a quarter of its records' bytes: where kernels add them up, and where the host reads them.
        self._found = torch.zeros(count, dtype=torch.int32, device=device)
        self._sizes = torch.zeros(count, dtype=torch.int32, pin_memory=device.type == "cuda")

    def publish(self, shards: Sequence[Sequence[torch.Tensor]], epoch: int) -> None:
        """Publish the shards, by unit and parameter. Does not wait."""
        units = zip(self._layout.units, shards, strict=True)
        mover = device_mover(self._layout.mover)
        mover.zero([self._found])
        mover.pack([self._packed(unit, tensors, epoch) for unit, tensors in units], self._found)
        mover.put(self._sizes.data_ptr(), self._found.data_ptr(), self._sizes.nbytes)

    def _packed(self, unit: UnitSpec, shards: Sequence[torch.Tensor], epoch: int) -> PackedUnit:
        mine, params = self._layout.mine, range(len(unit.params))
        places = [mine.published(unit, i, epoch) for i in params]
        before = [mine.published(unit, i, epoch - 1) for i in params]
        return places, before, shards, mine.changes(unit)[: most_packed(unit)]

    def note(self, epoch: int) -> None:
        """Store the words of what has changed; what `publish` has asked for has settled.

        Packing has overwritten the changes that came last, also where there are none now: a host that has not read
        them yet reads the whole shard.
        """
        for unit, patches, words in zip(self._layout.units, self._layout.patches, self._sizes.tolist(), strict=False):
            packed = patches.directory_bytes + 4 * words
            if not words:
                self._protocol.drop_changes(unit, WHOLE)
            else:
                note_version(self._protocol, unit, packed if packed <= most_packed(unit) else WHOLE, 0, epoch)


def most_packed(unit: UnitSpec) -> int:
    """Bytes of changes that are worth reading in place of the shard: three quarters of it, of whole words."""
    return unit.published_bytes * 3 // 16 * 4


def changes_of(protocol: MemberProtocol, seconds: Callable[[int], float]) -> PublishedChanges | DeviceChanges | None:
    """What publishes the shards of a member whose heap says changes, else None. `seconds`: see `PublishedChanges`."""
    layout = protocol.layout
    if not layout.says_changes:
        return None
    return DeviceChanges(protocol) if layout.heap.lanes.asynchronous else PublishedChanges(protocol, seconds)
