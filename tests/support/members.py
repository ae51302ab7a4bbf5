"""All members of one heap group in one process, so that a test decides in which order things happen.

Each member has a real `ShmHeap` and maps the others' memory for itself, so the heap, the locks and the words do what
they do between processes, and a test can stop every member where it wants to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from odc.errors import WaitTimeoutError
from odc.memory import Attachment, ShmHeap
from odc.protocol import Gradient, HeapLayout, RankGrid, UnitSpec, Word, accumulator_dtype
from odc.runtime import Endpoint, Member, Service
from odc.settings import Settings

Layout = Sequence[Sequence[tuple[str, int, torch.dtype]]]
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def units_of(
    layout: Layout, settings: Settings, frozen: Collection[str] = (), coarse: Collection[str] = ()
) -> list[UnitSpec]:
    """Units u0, u1, ... of (parameter, elements of a padded shard, compute dtype); `frozen` and `coarse` are
    parameters' names.
    """
    dtype = accumulator_dtype(settings.reproducible)
    return [UnitSpec.build(i, f"u{i}", params, dtype, frozen, coarse) for i, params in enumerate(layout)]


def gradients(unit: UnitSpec, shards: int, value: float = 1.0, short: int = 0) -> list[Gradient]:
    """Of every parameter, in its compute dtype; `short` elements short of whole shards."""
    return [
        Gradient(i, torch.full((shards * spec.numel - short,), value, dtype=spec.dtype))
        for i, spec in enumerate(unit.params)
    ]


def room(unit: UnitSpec, shards: int) -> list[torch.Tensor]:
    """Where a fetch of the unit may write: -1 everywhere."""
    return [torch.full((shards * spec.numel,), -1.0, dtype=spec.dtype) for spec in unit.params]


class HeapGroup:
    """Heaps, endpoints and services of all members; close it.

    Args:
        layout: parameters by unit.
        shards: members that share one copy.
        replicas: copies.
        frozen: names of parameters, in whichever unit.
        coarse: names of parameters whose sums cross as int8 where the settings ask for it.
        hosts: which of several hosts each member is on; those of others are not mapped.
        node_size: members of a node, where a host has several.
        regions: of words that each heap has beside, by name and bytes, for a member's grid.
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
        coarse: Collection[str] = (),
        hosts: tuple[int, ...] = (),
        node_size: int = 0,
        regions: Callable[[RankGrid], Iterable[tuple[str, int]]] = lambda grid: (),
    ) -> None:
        self.settings = settings or Settings(timeout_s=60.0)
        self.units = units_of(layout, self.settings, frozen, coarse)
        self.ranks = tuple(10 + 3 * member for member in range(shards * replicas))
        self.by_hand, self.notified = by_hand, list[int]()
        self.layouts: list[HeapLayout] = []
        for me in range(len(self.ranks)):
            heap = ShmHeap("group", self.ranks, me, self._connect, 60.0)
            grid = RankGrid(self.ranks, shards, me, hosts, node_size)
            for name, nbytes in regions(grid):
                heap.allocate(name, nbytes, words=True)
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
        """Map every heap in every member."""
        for layout in self.layouts:
            for member in layout.grid.members:
                layout.heap.whole(member)

    def attach_local(self) -> None:
        """Map every heap in every member of its host."""
        for layout in self.layouts:
            for member in layout.grid.local:
                layout.local(member).attach()

    def push(self, member: int, value: float = 1.0, unit: int = 0) -> int:
        """Push `value` in every element of a unit; returns the bytes that left the member."""
        spec = self.units[unit]
        return self.members[member].pusher.push(spec, gradients(spec, self.members[member].grid.shards, value))

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
        """Open the next epoch of every member."""
        for member in range(len(self.ranks)):
            self.publish(member, value)

    @contextmanager
    def late(self, match: str = "waiting for") -> Iterator[None]:
        """The block must run into its deadline; takes the abort back, so that the test can go on."""
        with pytest.raises(WaitTimeoutError, match=match):
            yield
        for member, layout in enumerate(self.layouts):
            layout.peer(member).board.store(Word.ABORT, 0)

    def close(self) -> None:
        """Close all heaps."""
        for layout in self.layouts:
            layout.close()

    def __enter__(self) -> HeapGroup:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


@contextmanager
def member_of_pool(rank: int, world: int, identity: str, layout: Layout, settings: Settings) -> Iterator[Member]:
    """In a rank of a pool: its membership in a root of all ranks, as `odc.fsdp` builds it, without a model."""
    from odc.fsdp import default_store

    grid = RankGrid(tuple(range(world)), world, rank)
    member = Member(
        default_store(), identity, grid, units_of(layout, settings), settings, "test",
        lambda rendezvous: ShmHeap(identity, grid.ranks, rank, rendezvous.connect, settings.timeout_s),
    )  # fmt: skip
    member.announce("")
    yield member
    wait = member.shut_down()
    assert wait is not None
    wait()
