"""A member whose heap is mapped into this process: its words, its shards and its staging slots."""

from __future__ import annotations

import numpy as np
import torch

from odc.memory import MUTEX_BYTES, RobustMutex, SymmetricHeap, Words
from odc.protocol.grid import RankGrid
from odc.protocol.peers.board import PeerBoard, words_at
from odc.protocol.sink import WordSink
from odc.protocol.units import UnitSpec
from odc.protocol.words import VERSION_WORDS, VERSIONS_KEPT, Word

# Words that threads sleep on (`Waiter.until_word`). A thread that sleeps on another one wakes after WORD_SLEEP_S.
_AWAITED = frozenset({Word.PUBLISHED, Word.DONE, Word.COMPLETE, Word.READ, Word.REDUCED})


class PushedWords(Words):
    """This rank's board in a job over several hosts: what is stored goes into `sink`, and wakes waiting threads."""

    __slots__ = ("_sink",)

    def __init__(self, address: int, count: int, keepalive: object, sink: WordSink) -> None:
        super().__init__(address, count, keepalive)
        self._sink = sink

    def store(self, i: int, value: int) -> None:
        super().store(i, value)
        if i in _AWAITED:
            self.wake(i)
        self._sink.stored(int(i), value)


class LocalPeer(PeerBoard):
    """One member, this rank's own included. The first question about another member attaches to it, which may wait.

    Questions may be asked from any thread; they raise as `SymmetricHeap.tensor` does. Tensors are views, not copies.
    `buffers` published versions (1 or 2) lie side by side; `parameters` counts those of all units.
    """

    def __init__(self, heap: SymmetricHeap, grid: RankGrid, member: int, buffers: int, parameters: int) -> None:
        self.member = self.column = member
        self.rank, self._grid = heap.ranks[member], grid
        self._heap, self._buffers, self._parameters = heap, buffers, parameters
        # Made once: a view of shared memory costs more than to copy a small parameter.
        self._published: dict[tuple[int, int, int], torch.Tensor] = {}
        self._shards: dict[tuple[int, int], torch.Tensor] = {}
        self._accumulators: dict[int, torch.Tensor] = {}
        self._mutexes: dict[int, RobustMutex] = {}
        self._pushed: PushedWords | None = None
        self._lasts: np.ndarray | None = None
        self._history: np.ndarray | None = None

    def forget(self) -> None:
        """Drop the views that are kept, so that the memory can be given back."""
        self._published.clear()
        self._shards.clear()
        self._accumulators.clear()
        self._mutexes.clear()
        self._pushed = self._lasts = self._history = None

    # words -------------------------------------------------------------------------------------------------------

    @property
    def board(self) -> Words:
        return self._pushed or self._heap.words(self.member, "board")

    def push_board(self, sink: WordSink) -> None:
        """Send what is stored in this rank's own board, from now on."""
        words = self._heap.words(self.member, "board")
        self._pushed = PushedWords(self._heap.address(self.member, "board"), len(words), words, sink)

    @property
    def sent(self) -> Words:
        """Blocks that each source has posted to the member, cumulative; word `source` is written by that source."""
        return self._heap.words(self.member, "sent")

    @property
    def accumulated(self) -> Words:
        """Blocks of each source that the member's daemon has added, cumulative."""
        return self._heap.words(self.member, "accumulated")

    @property
    def claims(self) -> Words:
        return self._heap.words(self.member, "claimed")

    @property
    def lasts(self) -> Words:
        """LAST, over hosts: two words a unit, how often the member had pushed it, and the epoch of its last push."""
        return self._heap.words(self.member, "node/lasts")

    def last_epochs(self) -> np.ndarray:
        """int64 [units]: the second words of `lasts`, at a glance. What is found here must be loaded as a word."""
        if self._lasts is None:
            self._lasts = self.lasts.as_tensor().numpy()[1::2]
        return self._lasts

    def pushes(self, source: int) -> torch.Tensor:
        """int64 [parameters]: cumulative pushes of each parameter by `source`, which writes them before its DONE.

        `source` is on the member's host: of members on others `RemotePeer.pushes` knows them.
        """
        count, row = self._parameters, self._grid.index(source)
        return self._heap.tensor(self.member, "pushes", torch.int64, offset=row * count, numel=count)

    def all_pushes(self) -> torch.Tensor:
        """int64 [members of the host, parameters]: `pushes` of every source."""
        members, count = len(self._grid.local), self._parameters
        every = self._heap.tensor(self.member, "pushes", torch.int64, numel=members * count)
        return every.view(members, count)

    def _texts(self, name: str, offset: int, nbytes: int) -> memoryview:
        return self._heap.words(self.member, name).as_bytes(offset, nbytes)

    # shards ------------------------------------------------------------------------------------------------------

    def published(self, unit: UnitSpec, param: int, epoch: int = 0) -> torch.Tensor:
        """1-D [elements of a padded shard] in compute dtype; `epoch` matters only where there are two buffers."""
        key = unit.index, param, epoch % self._buffers
        view = self._published.get(key)
        if view is None:
            spec = unit.params[param]
            at = (key[2] * unit.published_bytes + spec.published_offset) // spec.dtype.itemsize
            view = self._published[key] = self._view(f"published/{unit.index}", spec.dtype, at, spec.numel)
        return view

    def published_bytes(self, unit: UnitSpec, epoch: int = 0) -> torch.Tensor:
        """uint8 [unit.published_bytes or more]: the published shard of `unit`, parameter after parameter."""
        key = unit.index, epoch % self._buffers
        view = self._shards.get(key)
        if view is None:
            at = key[1] * unit.published_bytes
            view = self._shards[key] = self._view(f"published/{unit.index}", torch.uint8, at)
        return view

    def versions(self, unit: UnitSpec) -> Words:
        """The words of a unit's shard that other hosts get a copy of (`VersionWord`)."""
        return words_at(self._heap, self.member, "versions", unit.index * VERSION_WORDS, VERSION_WORDS)

    def history(self) -> np.ndarray:
        """int64 [VERSIONS_KEPT, units, VERSION_WORDS]: `versions` of all units, then those of the versions before,
        newest first. Readers outside the job read them.
        """
        if self._history is None:
            words = self._heap.words(self.member, "versions").as_tensor().numpy()
            self._history = words.reshape(VERSIONS_KEPT, -1, VERSION_WORDS)
        return self._history

    def changes(self, unit: UnitSpec) -> torch.Tensor:
        """uint8: where the changes of a unit's shard lie, those of several versions."""
        return self._view(f"changes/{unit.index}", torch.uint8, 0)

    def accumulator(self, unit: UnitSpec) -> torch.Tensor:
        """1-D [unit.numel] in the accumulator's dtype."""
        view = self._accumulators.get(unit.index)
        if view is None:
            view = self._view(f"accumulator/{unit.index}", unit.accumulator_dtype, 0, unit.numel)
            self._accumulators[unit.index] = view
        return view

    def _view(self, name: str, dtype: torch.dtype, offset: int, numel: int | None = None) -> torch.Tensor:
        # One made in inference mode could never be written outside of it.
        with torch.inference_mode(False):
            return self._heap.tensor(self.member, name, dtype, offset=offset, numel=numel)

    def mutex(self, unit: UnitSpec) -> RobustMutex:
        """The lock that guards adds into the accumulator of `unit`."""
        mutex = self._mutexes.get(unit.index)
        if mutex is None:
            address = self._heap.address(self.member, "mutexes") + unit.index * MUTEX_BYTES
            what = f"the accumulator of unit {unit.name!r} on rank {self.rank}"
            # The words keep the memory mapped.
            mutex = RobustMutex(address, self._heap.words(self.member, "mutexes"), what)
            self._mutexes[unit.index] = mutex
        return mutex

    # staging and queue -------------------------------------------------------------------------------------------

    def staging_address(self, distance: int) -> int:
        """Where the staging ring of the source `distance` places before the member begins; valid until `close`."""
        return self._heap.address(self.member, f"staging/{distance}")

    def staging(self, distance: int) -> torch.Tensor:
        """uint8 [slots * bytes of a slot]: the same ring."""
        return self._heap.tensor(self.member, f"staging/{distance}", torch.uint8)

    def headers(self, distance: int) -> torch.Tensor:
        """int64 [slots * header words]: the headers of the same ring."""
        return self._heap.tensor(self.member, f"headers/{distance}", torch.int64)

    def offers(self) -> torch.Tensor:
        """uint8 [queue_bytes, rounded up to 64]: the microbatches that the member offers, and their table."""
        return self._heap.tensor(self.member, "queue", torch.uint8)
