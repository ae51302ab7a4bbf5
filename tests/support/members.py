"""All members of one heap group in one process, so that a test decides in which order things happen.

Each member has a real `ShmHeap` and maps the others' memory for itself, so the heap, the locks and the words do what
they do between processes, and a test can stop every member where it wants to.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from odc.errors import WaitTimeoutError
from odc.memory import Attachment, ShmHeap
from odc.protocol import HeapLayout, RankGrid, UnitSpec, Word, accumulator_dtype
from odc.runtime import Endpoint, Service
from odc.settings import Settings

Layout = Sequence[Sequence[tuple[str, int, torch.dtype]]]
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def units_of(layout: Layout, settings: Settings, frozen: Collection[str] = ()) -> list[UnitSpec]:
    """Units u0, u1, ... of (parameter, elements of a padded shard, compute dtype); `frozen` are parameters' names."""
    dtype = accumulator_dtype(settings.reproducible)
    return [UnitSpec.build(i, f"u{i}", params, dtype, frozen) for i, params in enumerate(layout)]


class HeapGroup:
    """Heaps, endpoints and services of all members; close it.

    Args:
        layout: parameters by unit.
        shards: members that share one copy.
        replicas: copies.
        frozen: names of parameters, in whichever unit.
        hosts: which of several hosts each member is on; those of others are not mapped.
        node_size: members of a node, where a host has several.
        by_hand: pushed blocks stay in their slots until `drain`; else a notification has them added at once.

    Global ranks are 10, 13, 16, ...: no test passes by taking a member for a rank.
    """

    def __init__(
        self,
        layout: Layout,
        shards: int,
        *,
        replicas: int = 1,
        settings: Settings | None = None,
        by_hand: bool = False,
        frozen: Collection[str] = (),
        hosts: tuple[int, ...] = (),
        node_size: int = 0,
    ) -> None:
        self.settings = settings or Settings(timeout_s=60.0)
        self.units = units_of(layout, self.settings, frozen)
        self.ranks = tuple(10 + 3 * member for member in range(shards * replicas))
        self.by_hand, self.notified = by_hand, list[int]()
        self.layouts: list[HeapLayout] = []
        for me in range(len(self.ranks)):
            heap = ShmHeap("group", self.ranks, me, self._connect, 60.0)
            grid = RankGrid(self.ranks, shards, me, hosts, node_size)
            self.layouts.append(HeapLayout(heap, grid, self.units, self.settings, "test"))
        self.members = [Endpoint(layout, self.notify) for layout in self.layouts]
        self.services = [Service("group", layout) for layout in self.layouts]

    def _connect(self, member: int) -> Attachment:
        heap = self.layouts[member].heap
        return Attachment(os.dup(heap.fd), heap.nbytes, heap.digest)

    def notify(self, member: int) -> None:
        self.notified.append(member)
        if not self.by_hand:
            self.drain(member)

    def attach(self) -> None:
        """Have everybody map everybody."""
        for layout in self.layouts:
            layout.heap.base_addresses()

    def attach_local(self) -> None:
        """Have everybody map everybody of its host."""
        for layout in self.layouts:
            for member in layout.grid.local:
                layout.local(member).attach()

    def drain(self, member: int) -> int:
        """Add all blocks that were posted to `member`; returns the rounds it took."""
        rounds = 0
        while self.services[member].drain():
            rounds += 1
        return rounds

    def publish(self, member: int, value: float = 0.0, dirty: bool = True) -> None:
        """Open the member's next epoch with every element set to `value`."""
        shards = [[torch.full((p.numel,), value) for p in unit.params] for unit in self.units]
        self.members[member].shards.publish(shards, [dirty] * len(self.units))

    def publish_all(self, value: float = 0.0) -> None:
        """Open the next epoch everywhere."""
        for member in range(len(self.ranks)):
            self.publish(member, value)

    @contextmanager
    def late(self, match: str = "waiting for") -> Iterator[None]:
        """Expect the block to run into its deadline, and take the abort back, so that the test can go on."""
        with pytest.raises(WaitTimeoutError, match=match):
            yield
        for member, layout in enumerate(self.layouts):
            layout.peer(member).board.store(Word.ABORT, 0)

    def close(self) -> None:
        """Give everything back."""
        for layout in self.layouts:
            layout.close()

    def __enter__(self) -> HeapGroup:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()
