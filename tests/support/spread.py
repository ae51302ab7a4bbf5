"""Four members of two hosts in one process, with an engine that copies between their heaps."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import torch

from odc.errors import PeerLostError
from odc.hosts.cache import NodeCache
from odc.hosts.heaps import RemoteHeaps
from odc.hosts.sums import EarlySums, HostSums
from odc.protocol import Word
from odc.protocol.device_changes import changes_of
from odc.protocol.fetch import PublishedShards
from odc.protocol.words import VersionWord
from odc.settings import Accumulate, Settings
from odc.worker import Worker
from support.linked import HOSTS
from support.members import F32, HeapGroup, Layout, room

LAYOUT = [[("w", 8, F32), ("b", 2, F32)], [("v", 4, F32)], [("u", 6, F32)]]


class Copies:
    """An engine of `me` that reads the heap of the other member; it counts."""

    def __init__(self, group: HeapGroup, me: int, only_into_own: bool = False) -> None:
        self.group, self.me, self.reads, self.nbytes = group, me, list[tuple[int, int]](), 0
        self.fails, self.only_into_own = False, only_into_own
        self._here, self.most = threading.local(), 0  # that a thread had going

    def begin(self, *arguments: Any, wait: bool, **options: Any) -> Copying:
        assert not wait or not self.going(), "a thread that reads waits for another to end"
        return Copying(self, functools.partial(self.read, *arguments, **options))

    def going(self) -> list[Copying]:
        """Reads of this thread that are in progress."""
        reads: list[Copying] = self._here.__dict__.setdefault("reads", [])
        return reads

    def read(self, rank: int, region: str, offset: int, into: torch.Tensor, **unused: Any) -> None:
        if self.fails:
            raise PeerLostError(f"rank {rank}: connection reset", culprit=rank)
        member = self.group.ranks.index(rank)
        assert not self.only_into_own or self.group.layouts[self.me].is_mine(into), "it reads into a peer's memory"
        heap = self.group.layouts[member].heap
        into.copy_(heap.whole(member)[offset : offset + into.numel()])
        self.reads.append((rank, into.numel()))
        self.nbytes += into.numel()


class Copying:
    """A read in progress, which copies when it is ended."""

    def __init__(self, engine: Copies, copy: Callable[[], None]) -> None:
        self._engine, self._copy = engine, copy
        engine.going().append(self)
        engine.most = max(engine.most, len(engine.going()))

    def finish(self) -> None:
        self._engine.going().remove(self)
        self._copy()

    def drop(self) -> None:
        self._engine.going().remove(self)


class Spread:
    """A group on two hosts, whose mirrors are written by hand, or on two nodes of one host.

    `summed` are the messages of readable sums that its members have sent: member, epoch, pushes by unit.
    """

    def __init__(
        self,
        accumulate: Accumulate = "server",
        *,
        layout: Layout = LAYOUT,
        nodes: bool = False,
        only_into_own: bool = False,
        coarse: Collection[str] = (),
        **options: Any,
    ) -> None:
        settings = Settings(timeout_s=60.0, accumulate=accumulate, **options)
        hosts = () if nodes else HOSTS
        self.group = HeapGroup(layout, 4, settings=settings, hosts=hosts, node_size=2 if nodes else 0, coarse=coarse)
        self.group.attach_local()
        self.engines, self.heaps, self.caches = list[Copies](), list[RemoteHeaps](), list[NodeCache]()
        self.workers, self.sums, self.readers = list[Worker](), list[HostSums](), list[EarlySums]()
        self.summed: list[tuple[int, int, dict[int, int]]] = []
        for me, member in enumerate(self.group.members):
            engine = Copies(self.group, me, only_into_own)
            self.workers.append(Worker("odc-ahead"))
            heaps = RemoteHeaps("group", engine, member.protocol)  # type: ignore[arg-type]
            self.caches.append(NodeCache(member.protocol, heaps, self.workers[-1]))
            changes = changes_of(member.protocol, self.caches[-1].reads)
            member.shards = PublishedShards(member.protocol, self.caches[-1].fill, changes)
            self.engines.append(engine)
            self.heaps.append(heaps)
            self.readers.append(EarlySums(member.protocol, heaps, self.workers[-1], functools.partial(self._send, me)))
            self.sums.append(self.readers[-1].sums)

    def _send(self, member: int, epoch: int, counts: dict[int, int]) -> None:
        self.summed.append((member, epoch, dict(counts)))

    def publish(self, value: float = 0.0) -> None:
        for member in range(4):
            self.group.publish(member, value + member)
        self.mirror(Word.PUBLISHED)

    def mirror(self, word: Word) -> None:
        """Copy a word of every member, and its shards' versions, into its mirrors, as links do."""
        for layout in self.group.layouts:
            for other in layout.grid.remote:
                for unit in self.group.units if layout.says_changes else ():
                    versions = self.group.layouts[other].mine.versions(unit)
                    for i in VersionWord:
                        layout.remote(other).versions(unit).store(i, versions.load(i))
                layout.peer(other).board.store(word, self.group.layouts[other].mine.board.load(word))

    def push(self, me: int, unit: int, value: float, *, last: bool = False) -> None:
        """Member `me` pushes `value` in every element of a unit."""
        self.group.push(me, value, unit)
        if last:
            self.group.members[me].pusher.end([self.group.units[unit]])

    def await_reads(self, me: int, count: int) -> None:
        """Wait until the threads of `me` have read so often."""
        reads = self.engines[me].reads

        def over(within_s: float) -> bool:
            time.sleep(min(within_s, 0.001))
            return len(reads) == count

        self.group.members[me].protocol.await_reads(2, "it", over)

    def finish(self, used: list[bool]) -> None:
        """Make all members DONE, and complete what the others read."""
        for me, member in enumerate(self.group.members):
            for layout in self.group.layouts:
                if layout.grid.is_remote(me):
                    layout.remote(me).pushes.copy_(member.pusher.counts)
                else:
                    layout.local(layout.grid.me).pushes(me).copy_(member.pusher.counts)
        for member, sums in zip(self.group.members, self.sums, strict=True):
            sums.complete(used)
            member.protocol.complete(wait=False)
        self.mirror(Word.COMPLETE)

    def fetch(self, me: int, unit: int) -> list[float]:
        spec = self.group.units[unit]
        out = room(spec, 4)
        self.group.members[me].shards.fetch(spec, out)
        return [values.item() for values in out[0].view(4, -1)[:, 0]]

    def close(self) -> None:
        for cache, reader in zip(self.caches, self.readers, strict=True):
            cache.close()
            reader.close()
        for worker in self.workers:
            worker.close(60.0)  # its thread holds the heaps
        self.group.close()
