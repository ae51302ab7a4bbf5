"""The end of a minibatch: from every rank's accumulators to `.grad`.

Sums are scaled once, in the accumulator's dtype. A parameter gets a `.grad` if any rank of the mesh pushed to it, on
every rank, also where its own chunk is empty; otherwise a norm over DTensors would hang on the ranks that have none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from odc.errors import AbandonedMinibatchError
from odc.fsdp import refusals
from odc.fsdp._torch_param import ShardedParam
from odc.fsdp.fetcher import FetchedGroup
from odc.memory import advise_huge
from odc.protocol import HeapLayout, Outcome, UnitSpec
from odc.protocol.reduction import Reduction, RoundedSum
from odc.runtime import Endpoint


class Collector:
    """Collects the gradients of one root, minibatch after minibatch; on the rank's main thread.

    Attributes:
        dirty: for each unit whether its accumulator was added to since it was last zeroed.
        writing: whether gradients are being written, and their hooks run, right now.
    """

    def __init__(self, member: Endpoint, groups: Sequence[FetchedGroup]) -> None:
        self._member, self._groups = member, groups
        self._seen = torch.zeros(member.layout.param_base[-1], dtype=torch.int64, device="cpu")
        self.dirty = [False] * len(groups)
        self.writing = False
        self._views = member.layout.settings.gradient_views

    def drop_abandoned(self) -> None:
        """Drop what was pushed here in the last epoch, if this rank has closed it as an evaluation, so that it has not
        collected, and another has abandoned it. After `await_end_of_epoch`.
        """
        protocol = self._member.protocol
        evaluated = protocol.closed_as(Outcome.EVALUATED) if protocol.epoch else []
        if protocol.grid.me not in evaluated or not protocol.closed_as(Outcome.ABANDONED):
            return
        protocol.await_accumulated()
        self._seen = push_counts(self._member.layout)
        self.dirty = [True] * len(self._groups)

    @torch.inference_mode(False)
    @torch.no_grad()
    def release_accumulators(self) -> None:
        """Copy every `.grad` that is a view of an accumulator: the next epoch is about to begin. In inference mode too
        the copies are tensors that later minibatches may add to.
        """
        if not self._views:
            return
        for group in self._groups:
            for param in group.odc_params:
                param.move_gradient(self._member.layout.is_mine)

    @torch.no_grad()
    def collect(self, who: str) -> AbandonedMinibatchError | None:
        """Wait until every rank is done, then write `.grad`; or return why no rank does. `who` begins the message."""
        member, protocol = self._member, self._member.protocol
        protocol.await_done(protocol.epoch)
        protocol.await_accumulated()
        counts = push_counts(member.layout)
        used = (counts != self._seen).tolist()
        self._seen = counts
        abandoned = refusals.abandonment(who, protocol)
        if abandoned is None and any(used):
            refusals.refuse_half_evaluated(protocol)
            refusals.refuse_uneven_steps(protocol)
        units = self._used_units(used)
        member.reduction.complete(units)
        if abandoned is None:
            member.layout.keep_residuals(used)
            member.reduction.gather(units)
            self._write_gradients(used)
        else:
            member.reduction.skip()
            self.dirty = [True] * len(self._groups)  # a push that was cut short has added more than it has counted
        if len(protocol.summed_with()) > 1:
            member.layout.heap.lanes.settle()  # this rank's reads of others' accumulators, and of what came from them
        protocol.read_all()
        return abandoned

    def _used_units(self, used: Sequence[bool]) -> list[bool]:
        bases = self._member.layout.param_base
        return [any(used[base:end]) for base, end in itertools.pairwise(bases)]

    def _write_gradients(self, used: Sequence[bool]) -> None:
        layout = self._member.layout
        self.writing = True
        try:
            for unit, group in zip(layout.units, self._groups, strict=True):
                base = layout.param_base[unit.index]
                flags = list(used[base : base + len(unit.params)])
                self.dirty[unit.index] = any(flags)
                divide = group.gradient_divide_factor or float(len(layout.grid.ranks))
                into = layout.mine.accumulator(unit) if self._views else None
                write_gradients(self._member.reduction, unit, group.odc_params, flags, divide, into)
                if group.odc_fills_unused and self._seen[base : base + len(unit.params)].any():
                    fill_unused(unit, group.odc_params, flags)
        finally:
            self.writing = False


def push_counts(layout: HeapLayout) -> torch.Tensor:
    """int64 [parameters]: cumulative pushes of each parameter by all members, as they wrote them into this heap."""
    counts = layout.mine.all_pushes().sum(0)
    for member in layout.grid.remote:
        counts += layout.remote(member).pushes
    return counts


def reduced(reduction: Reduction, unit: UnitSpec, divide_by: float, into: torch.Tensor | None = None) -> torch.Tensor:
    """This rank's shard of the gradient of `unit`, 1-D [unit.numel] in the accumulator's dtype, divided by `divide_by`.

    Sums in the order of its `parts`: every rank of a replica group computes the same bits. `into` may be one of them.
    """
    first, *others = reduction.parts(unit)
    assert isinstance(first, torch.Tensor)
    # A sum of several is brought `into` place when it is whole: the place holds one of them.
    total = torch.empty_like(first) if into is None or others else into
    if total.device.type == "cpu" and total is not into:
        advise_huge(total)  # freshly allocated: much of the time would be page faults
    if not others:
        return torch.div(first, divide_by, out=total)
    before = first
    for part in others:
        if isinstance(part, RoundedSum):
            part.add_to(before, total)
        else:
            torch.add(before, part, out=total)
        before = total
    total.div_(divide_by)
    return total if into is None else into.copy_(total)


def fill_unused(unit: UnitSpec, params: list[ShardedParam], used: list[bool]) -> None:
    """Give each of `params` that is trained, and that no rank has `used`, a gradient of zeros."""
    for spec, param, used_ in zip(unit.params, params, used, strict=True):
        if not used_ and param.parameter.requires_grad:
            device = param.shard().device
            param.add_gradient(torch.zeros(spec.numel, dtype=param.gradient_dtype, device=device), 0)


def write_gradients(
    reduction: Reduction,
    unit: UnitSpec,
    params: list[ShardedParam],
    used: list[bool],
    divide: float,
    into: torch.Tensor | None = None,
) -> None:
    """Add the minibatch's gradients of one unit to `.grad`, divided by `divide`, and run post-accumulate hooks.

    `used`: for each of `params` whether any rank pushed to it in this minibatch. One that was frozen since gets what
    was pushed before, as under FSDP2. A fresh `.grad` is a view of `into`.
    """
    if not any(used):
        return
    total = reduced(reduction, unit, divide, into)
    dtypes = {param.gradient_dtype for param, yes in zip(params, used, strict=True) if yes}
    by_dtype = {dtype: total.to(dtype) for dtype in dtypes}
    for spec, param, yes in zip(unit.params, params, used, strict=True):
        if yes:
            param.add_gradient(by_dtype[param.gradient_dtype], spec.accumulator_offset)
