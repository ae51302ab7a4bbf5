"""publish and fetch: this rank's shards to where its peers can read them, and theirs into its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from odc.protocol.protocol import MemberProtocol
from odc.protocol.units import UnitSpec
from odc.protocol.words import Word


class VersionedPublish(Protocol):
    """Publishes shards beside what has changed of them; see `odc.protocol.changes`."""

    def publish(self, shards: Sequence[Sequence[torch.Tensor]], epoch: int, whole: bool) -> None:
        """Copy the shards, by unit and parameter, to where peers can read them; `whole`: what lies there already is no
        version. Does not wait.
        """

    def note(self, epoch: int) -> None:
        """Store the words of what has changed; `publish` has settled."""


class PublishedShards:
    """The published shards of one root. `publish` on the rank's main thread, `fetch` on the fetch thread as well.

    `prefill(unit, lane)` brings what lies on other nodes, once it is published, to its `HeapLayout.holder` here;
    `changes` are for other hosts, where `HeapLayout.says_changes`.
    """

    def __init__(
        self,
        protocol: MemberProtocol,
        prefill: Callable[[UnitSpec, str], None] | None = None,
        changes: VersionedPublish | None = None,
    ) -> None:
        self._protocol, self._layout = protocol, protocol.layout
        self.count = protocol.grid.shards  # shards of each parameter
        self._owners = protocol.grid.shard_group_from_next()
        self._prefill, self._changes = prefill, changes
        self._sources = [(owner % self.count, self._layout.holder(owner)) for owner in self._owners]

    @torch.no_grad()
    def publish(self, shards: Sequence[Sequence[torch.Tensor]], dirty: Sequence[bool]) -> None:
        """Open the next epoch: copy this rank's shards to where peers can read them, in compute dtype.

        `shards`: for each unit and parameter this rank's padded shard, 1-D, in its own dtype; `dirty`: for each unit
        whether its accumulator was added to since it was last zeroed. Does not wait: no peer may read or push any
        more.
        """
        layout = self._layout
        # Where publishing was cut short before, what lies there is not what was published last.
        whole = self._protocol.board.load(Word.PUBLISHING) > self._protocol.epoch
        epoch = self._protocol.begin_publishing()
        if self._changes is None:
            layout.mover.publish(layout.published(epoch), [shard for tensors in shards for shard in tensors])
        else:
            self._changes.publish(shards, epoch, whole)
        layout.clear([unit for unit, added_to in zip(layout.units, dirty, strict=True) if added_to])
        layout.heap.lanes.settle()
        if self._changes is not None:
            self._changes.note(epoch)
        self._protocol.end_publishing()

    def fetch(self, unit: UnitSpec, destinations: Sequence[torch.Tensor], *, lane: str = "main") -> int:
        """Copy a whole unit out of its owners' heaps, one copy a shard; returns the bytes that came from peers.

        `destinations`: for each parameter 1-D contiguous [shards * padded shard] in compute dtype. `lane` is the
        waiting thread's in the trace. Waits until every owner has published the current epoch.
        """
        protocol = self._protocol
        protocol.await_published(self._owners, lane)
        if self._prefill is not None:
            self._prefill(unit, lane)
        sources = [(shard, peer.published_bytes(unit, protocol.epoch)) for shard, peer in self._sources]
        offsets = [spec.published_offset for spec in unit.params]
        self._layout.mover.gather(destinations, offsets, self.count, sources)
        fetched = (self.count - 1) * unit.published_bytes
        protocol.count(Word.FETCHED, fetched)
        return fetched
