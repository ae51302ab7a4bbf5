"""A process group that is made again under sharded modules that stay: the private torch names that takes.

FSDP keeps process groups beside the names of a mesh, and a mesh has a registry of them; both hold a group's sockets.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from odc.errors import UnsupportedError
from odc.fsdp._torch_compat import FSDPParamGroup, lacking
from odc.fsdp._torch_reshard import is_sharded_over, shard_anew

#: What the keys of the default process group begin with, in the store that it was made with.
DEFAULT_PREFIX = "0//"
_GROUPS = ("shard_process_group", "replicate_process_group", "reduce_scatter_process_group")

for _owner, _name in ((DeviceMesh, "_get_root_mesh"), (distributed_c10d, "_resolve_process_group")):
    if not hasattr(_owner, _name):
        raise lacking(_name)
for _name in ("_pg_registry", "_dim_group_names"):
    if _name not in inspect.getsource(DeviceMesh):
        raise lacking(f"DeviceMesh.{_name}")


def refuse_other_groups(groups: Iterable[FSDPParamGroup]) -> None:
    """UnsupportedError if units are sharded over other ranks than those of the default process group, in its order."""
    for mesh in _meshes(groups):
        ranks = mesh.mesh.flatten().tolist()
        if mesh.ndim != 1 or ranks != list(range(dist.get_world_size())):
            raise UnsupportedError(
                f"recovery is for models sharded over all ranks of the job, on a 1-D mesh; this mesh is {mesh}"
            )


def drop_groups(groups: Iterable[FSDPParamGroup]) -> None:
    """Destroy the default process group, and all that the units hold of it."""
    groups = list(groups)
    for info in _infos(groups):
        for name in _GROUPS:
            if hasattr(info, name):
                setattr(info, name, None)
    for mesh in _meshes(groups):
        mesh._pg_registry.clear()
    if dist.is_initialized():
        # gloo's destructor waits for ever for a connection on which a rank that lives has sent what no one receives.
        cast(Any, dist.group.WORLD).abort()
        dist.destroy_process_group()


def take_groups(groups: Iterable[FSDPParamGroup]) -> None:
    """Give the units the default process group that was made since `drop_groups`, which may have other ranks.

    Then parameters have other local parts, without values yet.
    """
    groups = list(groups)
    rank, world = dist.get_rank(), dist.get_world_size()
    if not all(is_sharded_over(group, rank, world) for group in groups):
        shard_anew(groups, world)
        return
    resolve = cast(Any, distributed_c10d)._resolve_process_group
    for mesh in _meshes(groups):
        for name in mesh._dim_group_names:
            mesh._pg_registry[name] = resolve(name)
    for info in _infos(groups):
        info.shard_process_group = info.mesh.get_group(info.shard_mesh_dim)


def _infos(groups: Iterable[FSDPParamGroup]) -> list[Any]:
    return list({id(group.mesh_info): group.mesh_info for group in groups}.values())


def _meshes(groups: Iterable[FSDPParamGroup]) -> list[Any]:
    found = [info.mesh for info in _infos(groups)]
    found += [mesh._get_root_mesh() for mesh in found]
    return list({id(mesh): mesh for mesh in found}.values())
