"""Units to fetch and push: modules of a given size, sharded by odc or by torch's FSDP2.

A unit has the parameters of a transformer block (seven matrices, two vectors): a fetch has a cost for each parameter.
"""

from __future__ import annotations

import gc
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

from odc.bench.ranks import held, let_go
from odc.fsdp import fully_shard, live_roots
from odc.settings import Settings

MIB = 1 << 20
_MATRICES = 7
_COLUMNS = 256

Shape = Literal["block", "one"]


class BenchUnit(nn.Module):
    """Seven matrices and two vectors ("block"), or a single matrix ("one"), of `nbytes` bytes in all."""

    def __init__(self, nbytes: int, dtype: torch.dtype, shape: Shape = "block", device: str = "cpu") -> None:
        super().__init__()
        numel = nbytes // dtype.itemsize
        if shape == "block":
            vectors = [_COLUMNS] * 2
            rows = (numel - sum(vectors)) // (_MATRICES * _COLUMNS)
            shapes: list[tuple[int, ...]] = [(rows, _COLUMNS)] * _MATRICES + [(n,) for n in vectors]
        else:
            shapes = [(numel // _COLUMNS, _COLUMNS)]
        self.weights = nn.ParameterList(torch.randn(shape, device=device).to(dtype) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Touches every parameter, whose gradients are then ones."""
        return sum((weight.sum() for weight in self.weights), x)


def sharded_by(
    arm: Literal["odc", "fsdp2"],
    nbytes: int,
    compute: torch.dtype,
    shape: Shape = "block",
    settings: Settings | None = None,
    device: str = "cpu",
) -> nn.Module:
    """A unit of `nbytes` bytes in `compute`, stored in fp32 and sharded over all ranks. Called on every rank."""
    torch.manual_seed(0)
    module = BenchUnit(nbytes * 4 // compute.itemsize, torch.float32, shape, device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    if arm == "odc":
        fully_shard(module, mesh=mesh, mp_policy=policy, settings=settings)
    else:
        fsdp2(module, mesh=mesh, mp_policy=policy)
    return module


def build(*args: Any, **options: Any) -> None:
    """Replaces what is held by a unit of `sharded_by`, as `held.module`. Called on every rank."""
    drop()
    held.module = sharded_by(*args, **options)


def drop() -> None:
    """Shuts down the roots that are held. Called on every rank."""
    for left in [root.shut_down() for root in live_roots()]:
        left()
    let_go()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # ranks may share the device
