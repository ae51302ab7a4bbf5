"""Cases on a sharded unit: accumulate, publish, gather, push, and a minibatch's begin and finish.

They time the runtime's calls on a real root, with bookkeeping, locks, credits and the server daemon.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from odc.bench import baselines
from odc.bench.heaps import COPY_ENGINE, TORCH_KERNEL, TRITON_KERNEL, triton_is_here
from odc.bench.ranks import held
from odc.bench.rounds import Action
from odc.bench.units import Shape, build, sharded_by
from odc.fsdp import Root, root_of
from odc.memory import advise_huge
from odc.movers.choice import DataMover
from odc.movers.cuda import CudaMover
from odc.protocol import Adder, Gradient, Piece
from odc.settings import Settings


def opened(
    nbytes: int, device: str, compute: torch.dtype = torch.float32, shape: Shape = "block", **settings: Any
) -> Root:
    """The root of a unit of `nbytes` bytes in `compute`, stored in fp32, whose minibatch is open."""
    gc.collect()
    build("odc", nbytes, compute, shape, Settings(**settings), device)
    held.module.unshard()
    held.module.reshard()
    return root_of(held.module)


def accumulate(nbytes: int, device: str) -> list[Action]:
    """Adds `nbytes` of fp32 to the next rank's accumulator, as a pusher does with `accumulate="direct"`."""
    world = dist.get_world_size()
    root = opened(nbytes * world, device, shape="one", accumulate="direct")
    (unit,) = root.layout.units
    owner = root.grid.shard_group[(root.grid.shard + 1) % world]
    values = [Piece(0, torch.ones(unit.numel, device=device))]
    adder, moved = Adder(root.layout), unit.numel * 4
    others = [*baselines.add(moved, device), *baselines.reduce_scatter(moved, device)]
    against = tuple(other.name for other in others)
    return [Action("accumulate", lambda: adder.add(owner, unit, values), moved, against), *others]


def publish_cast(nbytes: int, device: str) -> list[Action]:
    """Publishes shards in fp32 as `nbytes` of bf16."""
    return publish(nbytes, device, torch.bfloat16)


def publish(nbytes: int, device: str, compute: torch.dtype = torch.float32) -> list[Action]:
    """Copies `nbytes` of this rank's shards to where peers can read them."""
    name = "publish" if compute is torch.float32 else "publish, cast to bf16"
    root = opened(nbytes * dist.get_world_size(), device, compute)
    moved = sum(unit.published_bytes for unit in root.layout.units)
    shards = [[param.shard() for param in group.odc_params] for group in root.groups]
    limit = baselines.copy(moved, device, dtype=compute)
    mine, epoch = root.layout.mine, root.minibatch.epoch
    places = [[mine.published(unit, i, epoch) for i in range(len(unit.params))] for unit in root.layout.units]

    @torch.no_grad()
    def copies() -> None:
        for place, shard in zip(places, shards, strict=True):
            root.layout.mover.publish(place, shard)

    # Every rank is in the same open minibatch and none fetches: no rank reads what is published anew.
    return [
        Action(name, lambda: root.member.shards.publish(shards, [False]), moved, (limit.name,)),
        # A publish ends with a wait for the device; its copies alone have a rate there.
        Action(f"{name}, its copies", copies, moved, (limit.name,), queued=True),
        limit,
    ]


class PlainCopy:
    """Copies the bytes of a gather from private memory into the module's destinations.

    They are allocated with the advice on huge pages that a fetch gives: fresh ones would cost a copy without it more
    page faults than the fetch beside it.
    """

    def __init__(self, root: Root, module: Any, device: str) -> None:
        (group,) = root.groups
        module.unshard()
        self._outputs = [param.allocate(root.grid.shards) for param in group.odc_params]
        module.reshard()
        self._sizes = [output.numel() * output.itemsize for output in self._outputs]
        self._sources = [torch.ones(size, dtype=torch.uint8, device=device) for size in self._sizes]
        self.nbytes = sum(self._sizes)

    def __call__(self) -> None:
        """Allocates and copies."""
        for output, source, size in zip(self._outputs, self._sources, self._sizes, strict=True):
            output.untyped_storage().resize_(size)
            if output.is_cuda:
                output.view(torch.uint8).copy_(source)
            else:
                advise_huge(output)
                ctypes.memmove(output.data_ptr(), source.data_ptr(), size)

    def free(self) -> None:
        """Frees the destinations."""
        for output in self._outputs:
            output.untyped_storage().resize_(0)


def gather(nbytes: int, device: str) -> list[Action]:
    """`module.unshard()` of a unit of `nbytes`, which allocates its parameters anew."""
    root = opened(nbytes, device)
    module = held.module
    plain = PlainCopy(root, module, device)
    kind = baselines.transport(device)
    limit = Action("plain copy", plain, plain.nbytes, after=plain.free, limit=True)
    if device == "cuda":  # nine copies are nine launches: the limit is one
        limit = baselines.copy(plain.nbytes, device)
    other: Any = sharded_by("fsdp2", nbytes, torch.float32, "block", None, device)
    collective = baselines.collective(f"FSDP2 on {kind}", other.unshard, plain.nbytes, device, other.reshard)
    against = (limit.name, collective.name)
    gathers = [
        Action(name, _unsharded(root, module, mover), plain.nbytes, against, after=module.reshard, queued=True)
        for name, mover in _gather_ways(root, device).items()
    ]
    return [*gathers, limit, collective]


def _gather_ways(root: Root, device: str) -> dict[str, DataMover]:
    """The mover that the root has; on a device each way to gather besides."""
    ways = {"unit gather": root.layout.mover}
    if device == "cuda":
        mine, all_, none = root.grid.shard, 1, 1 << 62  # pieces from this size on by the copy engine
        ways |= {
            f"unit gather, {COPY_ENGINE}": CudaMover(mine, all_),
            f"unit gather, {TORCH_KERNEL}": CudaMover(mine, none),
        }
        if triton_is_here():
            from odc.movers.compiled import CompiledMover

            ways[f"unit gather, {TRITON_KERNEL}"] = CompiledMover(mine, none)
    return ways


def _unsharded(root: Root, module: Any, mover: DataMover) -> Callable[[], object]:
    """`module.unshard()` by another mover than the root's."""

    def run() -> None:
        usual, root.layout.mover = root.layout.mover, mover
        try:
            module.unshard()
        finally:
            root.layout.mover = usual

    return run


def push(nbytes: int, device: str) -> list[Action]:
    """Sends a unit's gradients (`nbytes` of fp32) to their owners, until each has added them."""
    root = opened(nbytes, device)
    grid, shards = root.grid, root.grid.shards
    (unit,) = root.layout.units
    gradients = [Gradient(i, torch.ones(shards * spec.numel, device=device)) for i, spec in enumerate(unit.params)]
    moved = shards * unit.numel * 4
    leaving = moved * (shards - 1) // shards  # as a rank keeps its own part of the unit
    others = [*baselines.add(moved, device), *baselines.reduce_scatter(leaving, device)]

    def run() -> None:
        root.member.pusher.push(unit, gradients)
        for owner in grid.shard_group:
            ring = root.member.protocol.ring(owner, grid.me)
            while ring.added() != ring.posted():
                time.sleep(0)
                root.member.protocol.waiter.check("pushing")

    return [Action("push of a unit", run, moved, tuple(other.name for other in others)), *others]


def minibatch(nbytes: int, device: str) -> list[Action]:
    """Begin and finish of a minibatch over a unit of `nbytes` with nothing to compute."""
    root = opened(nbytes, device)

    def finish() -> None:
        root.minibatch.done()
        root.minibatch.collect()

    with torch.no_grad():
        finish()
    limit = baselines.copy(sum(unit.published_bytes for unit in root.layout.units), device)
    other = baselines.barrier()
    return [
        Action("begin (publishes)", root.minibatch.begin, limit.nbytes, (limit.name,)),
        Action("finish (nothing pushed)", finish, 0, (other.name,)),
        limit,
        other,
    ]
