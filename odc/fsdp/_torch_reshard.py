"""Sharded modules that stay while the number of ranks changes: the private torch names that takes.

Parameters stay the same objects, so optimizers, tied weights and hooks keep theirs; what changes is their local part,
which has no values yet, and their mesh. `.grad` and whatever was gathered for the former number of ranks are dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from odc.fsdp._torch_compat import FSDPMeshInfo, FSDPParam, FSDPParamGroup, lacking

_NAMES = ("_init_sharded_param", "_setattr_on_modules", "_sharding_spec", "post_forward_mesh_info")
_known = {*dir(FSDPParam), *inspect.get_annotations(FSDPParam), *FSDPParam.__init__.__code__.co_names}
for _name in _NAMES:
    if _name not in _known:
        raise lacking(f"FSDPParam.{_name}")
if "_spec" not in {*inspect.get_annotations(DTensor), *dir(DTensor)}:
    raise lacking("DTensor._spec")
_TAKES_MESH = "mesh_info" in inspect.signature(FSDPParam._init_sharded_param).parameters


def is_sharded_over(group: FSDPParamGroup, rank: int, world: int) -> bool:
    """Whether a unit on a 1-D mesh is sharded over `world` ranks of which this is number `rank`."""
    info: Any = group.mesh_info
    return (info.shard_mesh_rank, info.shard_mesh_size) == (rank, world)


def shard_anew(groups: Sequence[FSDPParamGroup], world: int) -> None:
    """Shard units, all on one 1-D mesh, over the `world` ranks of the default process group. Calls no collective."""
    before: DeviceMesh = groups[0].mesh_info.mesh
    mesh = init_device_mesh(before.device_type, (world,), mesh_dim_names=before.mesh_dim_names)
    info = FSDPMeshInfo(mesh, shard_mesh_dim=0)
    for group in groups:
        group.mesh_info = info
        if group.post_forward_mesh_info is not None:
            group.post_forward_mesh_info = info
        for param in group.fsdp_params:
            _shard_param_anew(param, info, group.device)


def _shard_param_anew(param: Any, info: FSDPMeshInfo, device: torch.device) -> None:
    kept: nn.Parameter = param.sharded_param
    whole = torch.empty(param._orig_size, dtype=kept.dtype, device=device)
    placement, uid = param.fsdp_placement, getattr(param, "_orig_param_uid", None)
    if param.post_forward_mesh_info is not None:
        param.post_forward_mesh_info = info
    param.mesh_info = info
    arguments = (nn.Parameter(whole, kept.requires_grad), device, lambda _: placement)
    param._init_sharded_param(*arguments, *([info] if _TAKES_MESH else []))
    if uid is not None:
        param._orig_param_uid = uid
    made = cast(Any, param.sharded_param)
    kept.grad = None
    kept._local_tensor, kept._spec = made._local_tensor, made._spec  # type: ignore[attr-defined]
    param.sharded_param = kept
    param._setattr_on_modules(kept)
    param.__dict__.pop("_unsharded_param", None)
    param.all_gather_outputs = []
