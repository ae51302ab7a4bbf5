"""Units to fetch and push: modules of a wanted size, sharded by odc or by torch's FSDP2.

Chose the parameters of a transformer block (seven matrices, two vectors) over one big tensor: a fetch pays for every
parameter, and a unit of one would hide that.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench._crew import held

MIB = 1 << 20
_MATRICES = 7
_COLUMNS = 256

Shape = Literal["block", "one"]


class Unit(nn.Module):
    """Seven matrices and two vectors ("block"), or a single matrix ("one"), of `nbytes` bytes in all."""

    def __init__(self, nbytes: int, dtype: torch.dtype, shape: Shape = "block") -> None:
        super().__init__()
        numel = nbytes // dtype.itemsize
        if shape == "block":
            vectors = [_COLUMNS] * 2
            rows = (numel - sum(vectors)) // (_MATRICES * _COLUMNS)
            shapes: list[tuple[int, ...]] = [(rows, _COLUMNS)] * _MATRICES + [(n,) for n in vectors]
        else:
            shapes = [(numel // _COLUMNS, _COLUMNS)]
        self.weights = nn.ParameterList(torch.randn(shape).to(dtype) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Touches every parameter; a gradient of ones for each."""
        return x + sum(weight.sum() for weight in self.weights)


def policy(compute: torch.dtype | None) -> MixedPrecisionPolicy:
    """Compute in `compute` (None: as stored), reduce in fp32."""
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def build(
    arm: Literal["odc", "fsdp2"], nbytes: int, compute: torch.dtype, shape: Shape = "block", settings: Any = None
) -> None:
    """Put a sharded unit of `nbytes` bytes in `compute` into `held.module`, stored in fp32. On every rank."""
    drop()
    torch.manual_seed(0)
    module = Unit(nbytes * 4 // compute.itemsize, torch.float32, shape)
    if arm == "odc":
        from odc.fsdp import fully_shard

        fully_shard(module, mp_policy=policy(compute), settings=settings)
    else:
        from torch.distributed.fsdp import fully_shard as collective

        collective(module, mp_policy=policy(compute))
    held.module = module


def drop() -> None:
    """Leave odc with what is held, on every rank."""
    import gc

    from odc.fsdp import live_roots

    for root in live_roots():
        root.leave()
    vars(held).clear()
    gc.collect()
