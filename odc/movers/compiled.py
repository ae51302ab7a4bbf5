"""Data moved on a CUDA device by odc's Triton kernels, and large pieces of peers by the copy engine.

What does not change from call to call is kept in plans, one for each unit: a call looks up addresses and launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from odc.kernels import (
    AddPlan,
    GatherPlan,
    PatchPlan,
    RoundingPlan,
    ScatterPlan,
    UnitChanges,
    converts,
    differ,
    fixed_rows,
    pack,
    passing_table,
    reserve_tables,
)
from odc.movers import cpu, driver, triton
from odc.movers.cuda import CopyAll, CudaMover, EngineCopies, Sources, Values
from odc.movers.plans import Dtypes, PackedUnit


class CompiledMover(CudaMover):
    """A `DeviceMover` whose adds, copies of this rank's shards and copies of peers' small pieces are kernels."""

    atomic = packs = True

    def __init__(self, own: int, copy_engine_bytes: int, copy_all: CopyAll = driver.copy_all) -> None:
        super().__init__(own, copy_engine_bytes, copy_all)
        self._gathers: dict[tuple[int, bool], GatherPlan] = {}
        self._scatters: dict[tuple[object, ...], ScatterPlan] = {}
        self._stages: dict[tuple[object, ...], EngineCopies] = {}

    add = staticmethod(triton.add)

    def prepare(self, device: torch.device, dtypes: Dtypes, atomic: bool) -> None:
        """See `DeviceMover.prepare`: each kernel is launched on one number. Its blocks do not depend on sizes."""
        reserve_tables(device)
        for own, dtype, total in dict.fromkeys(dtypes):
            value = torch.zeros(1, dtype=dtype, device=device)
            found = torch.zeros(1, dtype=torch.int32, device=device)
            self.differ([value], [torch.zeros(1, dtype=own, device=device)], found)
            memory = value.view(torch.uint8)
            triton.gather([torch.zeros_like(value)], [0], 1, [(0, memory)])
            if total is None:
                continue
            sums = torch.zeros(1, dtype=total, device=device)
            ways: list[tuple[torch.Tensor, dict[str, Any]]] = [(memory, {}), (sums, {"to": total, "alone": True})]
            for target, way in [*ways, (sums, {"to": total})] if atomic else ways:
                plan = ScatterPlan((1,), (1,), (0,), dtype, 1, device, **way)
                plan.run([value.data_ptr()], passing_table([target.data_ptr()], device), 0, 1)
            AddPlan([sums], [[value]]).run()

    def addition(self, places: Sequence[torch.Tensor], values: Sequence[Sequence[torch.Tensor]]) -> AddPlan:
        """See `DeviceMover.addition`; one launch a pair of dtypes."""
        return AddPlan(places, values)

    def pack(self, units: Sequence[PackedUnit], found: torch.Tensor) -> None:
        """See `DeviceMover.pack`; one launch a pair of dtypes, for all units."""
        pack([UnitChanges(*unit) for unit in units], found)

    def patches(self, params: Sequence[tuple[int, int, int]], device: torch.device) -> PatchPlan:
        """See `DeviceMover.patches`; a patch is one launch, and one more if some elements have a byte and some more."""
        return PatchPlan(params, device)

    def rounding(self, params: Sequence[tuple[int, int, bool]], device: torch.device) -> RoundingPlan:
        """See `DeviceMover.rounding`; each of its calls is one launch."""
        return RoundingPlan(params, device)

    def publish(self, places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        """See `DataMover.publish`; one launch a pair of dtypes."""
        ours, theirs = _divided(places, shards)
        triton.publish(*ours)
        if theirs[0]:
            cpu.publish(*theirs)

    def differ(self, places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], found: torch.Tensor) -> None:
        """See `DeviceMover.differ`; one launch a pair of dtypes, and no memory but for what torch converts."""
        ours, theirs = _divided(places, shards)
        differ(*ours, found)
        if theirs[0]:
            super().differ(*theirs, found)

    def _gather_rest(
        self,
        copies: EngineCopies,
        outs: Sequence[torch.Tensor],
        offsets: Sequence[int],
        shards: int,
        sources: Sources,
        large_came: bool,
    ) -> None:
        device = outs[0].device
        bases = [0] * shards
        for shard, memory in sources:
            bases[shard] = memory.data_ptr()
        table, order = passing_table(bases, device), [shard for shard, _ in sources]
        if large_came:
            if copies.small:
                plan, some = self._plan(copies, True, outs, offsets, shards), [outs[i].data_ptr() for i in copies.small]
                for first, count in _runs([shard for shard in order if shard != self._own], shards):
                    plan.run(some, table, first, count)
            order = [shard for shard in order if shard == self._own]
        plan, every = self._plan(copies, False, outs, offsets, shards), [out.data_ptr() for out in outs]
        for first, count in _runs(order, shards):
            plan.run(every, table, first, count)

    def _plan(
        self, copies: EngineCopies, small: bool, outs: Sequence[torch.Tensor], offsets: Sequence[int], shards: int
    ) -> GatherPlan:
        """Of all parameters, or of those with small pieces; kept as long as `copies`, which the mover keeps."""
        plan = self._gathers.get((id(copies), small))
        if plan is None:
            chosen = copies.small if small else range(len(outs))
            some, at = [outs[i] for i in chosen], [offsets[i] for i in chosen]
            plan = GatherPlan(some, at, shards, outs[0].device, make_rows=fixed_rows)
            self._gathers[id(copies), small] = plan
        return plan

    def stage(
        self, values: Sequence[torch.Tensor], numels: Sequence[int], offsets: Sequence[int], slots: Sources
    ) -> None:
        """See `DeviceMover.stage`. The engine takes large gradients that are whole; a kernel the others."""
        values = Values.of(values)
        width = values[0].itemsize
        key = tuple(numels), tuple(offsets), values.numels, width, 1 + max([shard for shard, _ in slots])
        copies = self._stages.get(key)
        if copies is None:
            copies = self._stages[key] = self._stage_copies(*key)
        if copies.large:
            sources, targets, sizes = copies.addresses(values.addresses, slots)
            self._copy_all(targets, sources, sizes)
        rest = copies.small
        if rest and not copies.large:
            self._scatter(values, numels, offsets, slots)
        elif rest:
            some = [values[i] for i in rest], [numels[i] for i in rest], [offsets[i] for i in rest]
            self._scatter(*some, slots)

    def _stage_copies(
        self, numels: Sequence[int], offsets: Sequence[int], wholes: Sequence[int], width: int, shards: int
    ) -> EngineCopies:
        short = {i for i, (numel, whole) in enumerate(zip(numels, wholes, strict=True)) if whole < numel * shards}
        sizes = [numel * width for numel in numels]
        return EngineCopies([offset * width for offset in offsets], sizes, self._least, short)

    def accumulate_all(
        self, values: Sequence[torch.Tensor], numels: Sequence[int], offsets: Sequence[int], accumulators: Sources
    ) -> None:
        """See `DeviceMover.accumulate_all`; one launch, and atomic."""
        self._scatter(values, numels, offsets, accumulators, accumulators[0][1].dtype)

    def add_part(
        self,
        values: Sequence[torch.Tensor],
        numels: Sequence[int],
        offsets: Sequence[int],
        shard: int,
        accumulator: torch.Tensor,
    ) -> None:
        """See `DeviceMover.add_part`; one launch."""
        self._scatter(values, numels, offsets, [(shard, accumulator)], accumulator.dtype, alone=True)

    def _scatter(
        self,
        values: Sequence[torch.Tensor],
        numels: Sequence[int],
        offsets: Sequence[int],
        memories: Sources,
        to: torch.dtype | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """To every owner's memory: added to what has dtype `to`, or copied where that is None."""
        values = Values.of(values)
        shards, dtype, device = 1 + max([shard for shard, _ in memories]), values[0].dtype, values[0].device
        key = values.numels, tuple(numels), tuple(offsets), dtype, shards, to, alone
        plan = self._scatters.get(key)
        if plan is None:
            plan = ScatterPlan(*key[:3], dtype, shards, device, to=to, alone=alone, make_rows=fixed_rows)
            self._scatters[key] = plan
        bases = [0] * shards
        for shard, memory in memories:
            bases[shard] = memory.data_ptr()
        table = passing_table(bases, device)
        for first, count in _runs([shard for shard, _ in memories], shards):
            plan.run(values.addresses, table, first, count)


_Pairs = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]  # places and shards


def _divided(places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> tuple[_Pairs, _Pairs]:
    """(what kernels move, what torch must convert), each with nothing in the place of what is the other's; the second
    has no pairs at all where kernels can move everything.
    """
    pairs = list(zip(places, shards, strict=True))
    known = [converts(shard.dtype, place.dtype) for place, shard in pairs]
    if all(known):
        return (places, shards), ((), ())

    def only(which: bool) -> _Pairs:
        kept = [pair if one == which else (pair[0][:0],) * 2 for pair, one in zip(pairs, known, strict=True)]
        return [place for place, _ in kept], [shard for _, shard in kept]

    return only(True), only(False)


def _runs(order: Sequence[int], shards: int) -> list[tuple[int, int]]:
    """(first shard, how many follow it) for shards in the order in which they are taken, which wraps around."""
    runs: list[tuple[int, int]] = []
    for shard in order:
        if runs and (runs[-1][0] + runs[-1][1]) % shards == shard:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((shard, 1))
    return runs
