"""A member elsewhere: on another host a mirror of its words, on another node a cache of its shards, sums for it.

All of it lies on this host, or node, in the heap of the member with the same index (its *column*), which every rank
here maps. So a wait polls local memory. The column's daemon writes the mirror; whoever is named in
docs/protocol.md writes the rest.
"""

from __future__ import annotations

import torch

from odc.memory import MUTEX_BYTES, RobustMutex, SymmetricHeap, Words
from odc.protocol.grid import RankGrid
from odc.protocol.peers.board import REASON_BYTES, PeerBoard, words_at
from odc.protocol.units import UnitSpec
from odc.protocol.words import BOARD_WORDS, VERSION_WORDS


class RemotePeer(PeerBoard):
    """The words of one member of another host. The first question attaches to its column, which may wait.

    Raises as `SymmetricHeap.tensor` does. Tensors are views.
    """

    def __init__(self, heap: SymmetricHeap, grid: RankGrid, member: int, parameters: int) -> None:
        self.member, self.rank = member, heap.ranks[member]
        self.column, self.row = grid.column(member), grid.row(grid.host(member))
        self._heap, self._parameters, self._rows = heap, parameters, grid.host_count - 1
        self._board: Words | None = None

    def forget(self) -> None:
        """Drop the views that are kept, so that the memory can be given back."""
        self._board = None

    @property
    def board(self) -> Words:
        board = self._board
        if board is None:
            board = self._board = words_at(self._heap, self.column, "mirror/board", self.row * BOARD_WORDS, BOARD_WORDS)
        return board

    def _texts(self, name: str, offset: int, nbytes: int) -> memoryview:
        start = self.row * REASON_BYTES * (2 if name == "abandoned" else 1) + offset
        return self._heap.words(self.column, f"mirror/{name}").as_bytes(start, nbytes)

    @property
    def pushes(self) -> torch.Tensor:
        """int64 [parameters]: cumulative pushes of each parameter by the member."""
        start = self.row * self._parameters
        return self._heap.tensor(self.column, "mirror/pushes", torch.int64, offset=start, numel=self._parameters)

    def versions(self, unit: UnitSpec) -> Words:
        """As of a `LocalPeer`."""
        count = len(self._heap.words(self.column, "mirror/versions")) // self._rows
        first = self.row * count + unit.index * VERSION_WORDS
        return words_at(self._heap, self.column, "mirror/versions", first, VERSION_WORDS)

    def mirrored(self, name: str) -> Words:
        """The mirror of the member's region `name`, of an arena."""
        count = self._heap.layout.size(f"mirror/{name}") // 8 // self._rows
        return words_at(self._heap, self.column, f"mirror/{name}", self.row * count, count)


class NodeShare:
    """The share of one member of another node that lies on this one: a cache of its shards, sums of gradients for it.

    The first question attaches to the member's column here, which may wait. Raises as `SymmetricHeap.tensor` does.
    Tensors are views. `sums_at` has the bytes before each unit's accumulator.
    """

    def __init__(self, heap: SymmetricHeap, nodes: RankGrid, member: int, sums_at: list[int]) -> None:
        self.member, self.rank = member, heap.ranks[member]
        self.column, self.row = nodes.column(member), nodes.row(nodes.host(member))
        self._heap, self._sums_at = heap, sums_at
        self._units = len(sums_at)
        self._views: dict[tuple[str, int, torch.dtype, int | None], torch.Tensor] = {}
        self._mutexes: dict[int, RobustMutex] = {}
        self._claims: dict[int, Words] = {}
        self._cached: dict[int, Words] = {}

    def forget(self) -> None:
        """Drop the views that are kept, so that the memory can be given back."""
        self._views.clear()
        self._mutexes.clear()
        self._claims.clear()
        self._cached.clear()

    # the node cache ----------------------------------------------------------------------------------------------

    def claims(self, unit: UnitSpec) -> Words:
        """Two words: the newest epoch in which a local rank has claimed the member's shard, and the member that has."""
        return self._words(self._claims, "node/claims", unit, 2)

    def cached(self, unit: UnitSpec) -> Words:
        """One word: the newest epoch whose shard lies in the cache; 0 while changes are applied to it."""
        return self._words(self._cached, "node/cached", unit, 1)

    def _words(self, kept: dict[int, Words], name: str, unit: UnitSpec, count: int) -> Words:
        """Made once: a fetch asks for those of every remote owner."""
        words = kept.get(unit.index)
        if words is None:
            first = (self.row * self._units + unit.index) * count
            words = kept[unit.index] = words_at(self._heap, self.column, name, first, count)
        return words

    def published_bytes(self, unit: UnitSpec, epoch: int = 0) -> torch.Tensor:
        """uint8 [unit.published_bytes or more]: the place of the member's shard in the cache; of the newest epoch."""
        return self._view(f"cache/{self.row}/{unit.index}", torch.uint8, 0, None)

    # the node sums -----------------------------------------------------------------------------------------------

    def accumulator(self, unit: UnitSpec) -> torch.Tensor:
        """1-D [unit.numel]: where this node adds its gradients for the member."""
        at = self._sums_at[unit.index] // unit.accumulator_dtype.itemsize
        return self._view(f"sums/{self.row}", unit.accumulator_dtype, at, unit.numel)

    def mutex(self, unit: UnitSpec) -> RobustMutex:
        """The lock that guards adds into `accumulator`."""
        return self._mutex(unit, 0, f"this node's sum of unit {unit.name!r} for rank {self.rank}")

    def claim_mutex(self, unit: UnitSpec) -> RobustMutex:
        """The lock that guards `claims`."""
        return self._mutex(unit, 1, f"the claim on the shard of unit {unit.name!r} of rank {self.rank}")

    def _mutex(self, unit: UnitSpec, kind: int, what: str) -> RobustMutex:
        at = (self.row * self._units + unit.index) * 2 + kind
        mutex = self._mutexes.get(at)
        if mutex is None:
            address = self._heap.address(self.column, "node/mutexes") + at * MUTEX_BYTES
            # The words keep the memory mapped.
            mutex = RobustMutex(address, self._heap.words(self.column, "node/mutexes"), what)
            self._mutexes[at] = mutex
        return mutex

    def _view(self, name: str, dtype: torch.dtype, offset: int, numel: int | None) -> torch.Tensor:
        # Made once: a view of shared memory costs more than to copy a small parameter.
        key = name, offset, dtype, numel  # a unit without trained parameters begins where the next one does
        view = self._views.get(key)
        if view is None:
            with torch.inference_mode(False):  # one made in inference mode could never be written outside of it
                view = self._views[key] = self._heap.tensor(self.column, name, dtype, offset=offset, numel=numel)
        return view
