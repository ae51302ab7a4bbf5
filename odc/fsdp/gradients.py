"""From accumulators to `.grad`, at the end of a minibatch.

Chose to scale once, in the accumulator's dtype, after everything was added, where FSDP2 scales every reduction: one
rounding instead of many, and any number of pushes. A parameter gets a `.grad` if any rank of the mesh pushed to it, on
every rank, also where its own chunk is empty; otherwise a norm over DTensors would hang on the ranks that have none.
"""

from __future__ import annotations

import torch

from odc.fsdp._torch_param import ShardedParam
from odc.runtime import Space, UnitSpec


def push_counts(space: Space) -> torch.Tensor:
    """int64 [parameters]: cumulative pushes of each parameter by all members, as written on the own heap."""
    geometry, count = space.geometry, space.param_base[-1]
    every = space.heap.tensor(geometry.me, "pushes", torch.int64, numel=len(geometry.ranks) * count)
    return every.view(len(geometry.ranks), count).sum(0)


def reduced(space: Space, unit: UnitSpec, divide_by: float) -> torch.Tensor:
    """The own shard's gradient of `unit`, 1-D [unit.numel] in the accumulator's dtype, divided by `divide_by`.

    Sums the per-source accumulators in rank order; with hybrid sharding then reads each replica's accumulator,
    one-sided, in rank order too: every rank of a column computes the same bits.
    """
    total: torch.Tensor | None = None
    for member in space.geometry.column:
        for source in range(space.sources):
            part = space.accumulator(member, unit, source)
            if total is None:
                total = part.clone()
            else:
                total.add_(part)
    assert total is not None  # a column holds at least the own member
    return total.div_(divide_by)


def write_gradients(space: Space, unit: UnitSpec, params: list[ShardedParam], used: list[bool], divide: float) -> None:
    """Add the minibatch's gradients of one unit to `.grad`, and run post-accumulate hooks.

    Args:
        params: of the unit, in its order.
        used: for each whether any rank pushed to it in this minibatch.
        divide: by what the sums are divided; FSDP2's default is the number of ranks.
    """
    wanted = [used_ and param.parameter.requires_grad for used_, param in zip(used, params, strict=True)]
    if not any(wanted):
        return
    total = reduced(space, unit, divide)
    dtypes = {param.gradient_dtype for param, yes in zip(params, wanted, strict=True) if yes}
    by_dtype = {dtype: total.to(dtype) for dtype in dtypes}
    for spec, param, yes in zip(unit.params, params, wanted, strict=True):
        if yes:
            param.add_gradient(by_dtype[param.gradient_dtype], spec.accumulator_offset)
