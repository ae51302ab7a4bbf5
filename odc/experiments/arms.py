"""How an arm's model is sharded and its microbatches are run, by torch's FSDP2 or by odc.

`fsdp2-resident` reduces in the backward of a dummy after the last microbatch: in the last real backward the ranks
would wait for each other at every unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from odc import fsdp
from odc.arms import Arm
from odc.experiments.collectives import record_collectives
from odc.settings import OptimizerSharding, Settings


def shard_model(
    arm: Arm,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    settings: Settings,
    device: str = "cpu",
    per_node: int = 2,
    optimizer_sharding: OptimizerSharding = "mesh",
    **options: Any,
) -> None:
    """Shards each block and then the model, in place. Every rank calls it; making the mesh may communicate.

    `settings` and `optimizer_sharding` are odc's and `options` those of `fully_shard`; `per_node` divides the number of
    ranks.
    """
    options["mesh"] = _mesh(arm, device, per_node)
    if arm.on_demand:
        for module in (*blocks, model):
            fsdp.fully_shard(module, settings=settings, optimizer_sharding=optimizer_sharding, **options)
        return
    if arm.transport == "resident":
        options["reshard_after_forward"] = False
    for module in (*blocks, model):
        fully_shard(module, **options)
    record_collectives(model, replicated=arm.within_node)


def _mesh(arm: Arm, device: str, per_node: int) -> DeviceMesh:
    world = dist.get_world_size()
    if not arm.within_node:
        return init_device_mesh(device, (world,))
    return init_device_mesh(device, (world // per_node, per_node), mesh_dim_names=("replicate", "shard"))


def run_minibatch(
    arm: Arm,
    model: nn.Module,
    count: int,
    backward: Callable[[int], None],
    pieces: Callable[[], None] | None = None,
) -> None:
    """Calls `backward(m)` for each microbatch m and leaves complete gradients in `.grad`; meets the other ranks.

    `count` is this rank's of `arm.counts`; the last microbatches of an arm with dummies must be dummies. `pieces` is
    called first, and runs this rank's pieces of split samples.
    """
    resident = arm.transport == "resident"
    if resident:
        _gather_all(model)
    with cast(Any, model).minibatch() if arm.on_demand else nullcontext():
        if pieces is not None:
            pieces()
        for m in range(count):
            last = m == count - 1
            if resident:
                _mark(model, last=last)
            elif arm.on_demand:
                cast(Any, model).set_is_last_backward(last)  # over hosts its gradients leave as they come
            elif arm.within_node:
                cast(Any, model).set_requires_all_reduce(last)  # gradients cross nodes once a minibatch
            backward(m)
            if resident and not last:
                # torch forgets the order of forwards only after a last backward. With an earlier microbatch in it, the
                # first block's backward would gather the last block again, only on ranks that ran several microbatches.
                fsdp.forget_forward_order(cast(Any, model))


def run_queue(
    model: Any,
    mine: Sequence[Mapping[str, Tensor]],
    costs: Sequence[float],
    backward: Callable[[int, Mapping[str, Tensor]], None],
) -> None:
    """Like `run_minibatch`, for a dynamic arm: offers `mine` to all ranks and computes what this rank claims.

    Calls `backward(number, tensors)` for a microbatch, which stands at place `number` in the queue.
    """
    with model.minibatch():
        claims = model.claim(mine, costs)
        for tensors in claims:
            backward(claims.number, tensors)


def _gather_all(model: nn.Module) -> None:
    """Gathers every unit now, so that no forward meets other ranks. All ranks meet, unit after unit."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def _mark(model: Any, *, last: bool) -> None:
    """Before the last backward nothing is reduced or given up."""
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)
    model.set_reshard_after_backward(last)
