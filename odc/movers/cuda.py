"""Data moved on a CUDA device by its copy engine and by torch. Nothing here waits for the device.

Of peers' memory, pieces from `Settings.copy_engine_bytes` on go by the copy engine, which takes no multiprocessor from
compute; all others together by one kernel of torch's, because a copy each would drown in launches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from odc.movers import cpu, driver
from odc.movers.plans import Addition, Dtypes, PackedUnit, Patches, Rounding

_COMPARED = 4 << 20  # elements at a time: what a comparison of shards with what was published takes beside them

Sources = Sequence[tuple[int, torch.Tensor]]
CopyAll = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


class Values(list[torch.Tensor]):
    """Gradients of one dtype on their way to several owners: what is asked for again and again is looked up once."""

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        super().__init__(values)
        self.numels = tuple([value.numel() for value in values])
        self.addresses = [value.data_ptr() for value in values]

    @classmethod
    def of(cls, values: Sequence[torch.Tensor]) -> Values:
        return values if isinstance(values, Values) else cls(values)


class EngineCopies:
    """Which pieces of a unit go by the copy engine to or from every owner, and where they lie there and here.

    `offsets` are bytes at an owner and `pieces` bytes of each parameter's shard, which lie one after the other here.
    Pieces from `least` on are `large`, but for those of parameters in `not_whole`.
    """

    def __init__(
        self, offsets: Sequence[int], pieces: Sequence[int], least: int, not_whole: Collection[int] = ()
    ) -> None:
        self.large = [i for i, size in enumerate(pieces) if size >= least and i not in not_whole]
        self.small = [i for i, size in enumerate(pieces) if size and i not in self.large]
        self._offsets = np.array([offsets[i] for i in self.large], dtype=np.int64)
        self._sizes = np.array([pieces[i] for i in self.large], dtype=np.int64)
        self._by_owners: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}

    def addresses(self, here: Sequence[int], owners: Sources) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(address here, address at its owner, bytes) of every piece; parameters are at `here`. 1-D, int64."""
        key = tuple([shard for shard, _ in owners])
        kept = self._by_owners.get(key)
        if kept is None:
            begins = np.array(key, dtype=np.int64)[:, None] * self._sizes
            kept = self._by_owners[key] = begins, np.tile(self._sizes, len(key))
        begins, sizes = kept
        bases = np.array([memory.data_ptr() for _, memory in owners], dtype=np.int64)
        starts = np.array([here[i] for i in self.large], dtype=np.int64)
        return (starts + begins).ravel(), (bases[:, None] + self._offsets).ravel(), sizes


class ForeachAddition:
    """An `Addition` by torch: one call for the first values of all places, one for their second, and so on."""

    def __init__(self, places: Sequence[torch.Tensor], values: Sequence[Sequence[torch.Tensor]]) -> None:
        self._turns: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        for turn in range(max(map(len, values), default=0)):
            pairs = [(place, each[turn]) for place, each in zip(places, values, strict=True) if turn < len(each)]
            self._turns.append(([place for place, _ in pairs], [value for _, value in pairs]))

    def run(self) -> None:
        for places, values in self._turns:
            torch._foreach_add_(places, values)


class CudaMover:
    """A `DeviceMover` without kernels of odc's own.

    `own` is this rank's shard index: no copy engine is needed for its memory, and none is as fast there as a kernel.
    """

    atomic = packs = False

    def __init__(self, own: int, copy_engine_bytes: int, copy_all: CopyAll = driver.copy_all) -> None:
        self._own, self._least, self._copy_all = own, copy_engine_bytes, copy_all
        self._copies: dict[tuple[tuple[int, ...], tuple[int, ...], int], EngineCopies] = {}

    publish = staticmethod(cpu.publish)
    zero = staticmethod(driver.zero)
    put = staticmethod(driver.copy)
    add = staticmethod(cpu.add)

    def prepare(self, device: torch.device, dtypes: Dtypes, atomic: bool) -> None:
        """See `DeviceMover.prepare`; torch compiles nothing, and loads a kernel when it is first launched."""
        for dtype, total in dict.fromkeys([kinds[1:] for kinds in dtypes]):
            value = torch.zeros(1, dtype=dtype, device=device)
            torch._foreach_copy_([torch.zeros_like(value)], [value])
            value.view(torch.uint8).zero_()
            if total is not None:
                torch._foreach_add_([torch.zeros(1, dtype=total, device=device)], [value])

    def gather(self, outs: Sequence[torch.Tensor], offsets: Sequence[int], shards: int, sources: Sources) -> None:
        """See `DataMover.gather`."""
        key = tuple(offsets), tuple([out.nbytes for out in outs]), shards
        copies = self._copies.get(key)
        if copies is None:
            copies = self._copies[key] = EngineCopies(key[0], [whole // shards for whole in key[1]], self._least)
        peers = [source for source in sources if source[0] != self._own] if copies.large else []
        if peers:
            targets, places, sizes = copies.addresses([out.data_ptr() for out in outs], peers)
            self._copy_all(targets, places, sizes)
        self._gather_rest(copies, outs, offsets, shards, sources, bool(peers))

    def _gather_rest(
        self,
        copies: EngineCopies,
        outs: Sequence[torch.Tensor],
        offsets: Sequence[int],
        shards: int,
        sources: Sources,
        large_came: bool,
    ) -> None:
        """This rank's own shard and, from peers, what is small; with `large_came` the engine has the rest."""
        places: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for shard, memory in sources:
            for i in range(len(outs)) if not large_came or shard == self._own else copies.small:
                nbytes, numel = outs[i].nbytes // shards, outs[i].numel() // shards
                if nbytes:
                    # `.data` has a version of its own: what autograd saved in forward may be filled again for backward.
                    places.append(outs[i].data[shard * numel : (shard + 1) * numel])
                    values.append(memory[offsets[i] : offsets[i] + nbytes].view(outs[i].dtype))
        if places:
            torch._foreach_copy_(places, values)

    def stage(
        self, values: Sequence[torch.Tensor], numels: Sequence[int], offsets: Sequence[int], slots: Sources
    ) -> None:
        """See `DeviceMover.stage`."""
        targets, sources, sizes = [], [], []
        for shard, slot in slots:
            for value, numel, offset in zip(values, numels, offsets, strict=True):
                begin, width = shard * numel, value.itemsize
                n = max(0, min(numel, value.numel() - begin))
                if n:
                    targets.append(slot.data_ptr() + offset * width)
                    sources.append(value.data_ptr() + begin * width)
                    sizes.append(n * width)
                if n < numel:
                    slot[(offset + n) * width : (offset + numel) * width].zero_()
        self._copy_all(*(np.array(each, dtype=np.int64) for each in (targets, sources, sizes)))

    def addition(self, places: Sequence[torch.Tensor], values: Sequence[Sequence[torch.Tensor]]) -> Addition:
        """See `DeviceMover.addition`."""
        return ForeachAddition(places, values)

    def add_part(
        self,
        values: Sequence[torch.Tensor],
        numels: Sequence[int],
        offsets: Sequence[int],
        shard: int,
        accumulator: torch.Tensor,
    ) -> None:
        """See `DeviceMover.add_part`."""
        places, parts = [], []
        for value, numel, offset in zip(values, numels, offsets, strict=True):
            part = value[shard * numel : (shard + 1) * numel]
            if part.numel():
                parts.append(part)
                places.append(accumulator[offset : offset + part.numel()])
        if parts:
            torch._foreach_add_(places, parts)

    def accumulate_all(
        self, values: Sequence[torch.Tensor], numels: Sequence[int], offsets: Sequence[int], accumulators: Sources
    ) -> None:
        """See `DeviceMover.accumulate_all`; torch adds nothing atomically."""
        raise NotImplementedError("torch adds nothing atomically")

    def pack(self, units: Sequence[PackedUnit], found: torch.Tensor) -> None:
        """See `DeviceMover.pack`; torch would allocate and wait for sizes."""
        raise NotImplementedError("torch packs no changes")

    def patches(self, params: Sequence[tuple[int, int, int]], device: torch.device) -> Patches:
        """See `DeviceMover.patches`."""
        raise NotImplementedError("torch packs no changes")

    def rounding(self, params: Sequence[tuple[int, int, bool]], device: torch.device) -> Rounding:
        """See `DeviceMover.rounding`; torch would allocate."""
        raise NotImplementedError("torch rounds no sums to 8 bits")

    def differ(self, places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], found: torch.Tensor) -> None:
        """See `DeviceMover.differ`; a few MiB at a time."""
        for i, (place, shard) in enumerate(zip(places, shards, strict=True)):
            for start in range(0, place.numel(), _COMPARED):
                part = slice(start, start + _COMPARED)
                published, now = place[part].view(torch.uint8), shard[part].to(place.dtype).view(torch.uint8)
                found[i].bitwise_or_((published != now).any())
