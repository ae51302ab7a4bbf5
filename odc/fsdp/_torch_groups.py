"""A process group that is made again under sharded modules that stay: the private torch names that takes.

FSDP keeps process groups beside the names of a mesh, and a mesh has a registry of them; both hold a group's sockets.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from odc.errors import UnsupportedError
from odc.fsdp._torch_compat import FSDPParamGroup, lacking
from odc.fsdp._torch_reshard import is_sharded_over, shard_anew

#: What the keys of the default process group begin with, in the store that it was made with.
DEFAULT_PREFIX = "0//"
#: Torch's name of the NCCL that `abort_nccl` ends. What torch 2.15 calls "nccl" is another one, which has no group of
#: calls in which several communicators can be aborted.
NCCL = "nccl-legacy" if hasattr(distributed_c10d, "_register_builtin_nccl_legacy_backend") else "nccl"
_cut_short: list[Any] = []  # process groups
_NEVER_SENT = 0x0DC  # tag
_GROUPS = ("shard_process_group", "replicate_process_group", "reduce_scatter_process_group")

for _owner, _name in (
    (DeviceMesh, "_get_root_mesh"),
    (distributed_c10d, "_resolve_process_group"),
    (distributed_c10d, "_abort_process_group"),
    (cast(Any, distributed_c10d)._world, "pg_backend_config"),
    (cast(Any, distributed_c10d)._world, "pg_group_ranks"),
):
    if not hasattr(_owner, _name):
        raise lacking(_name)
for _name in ("_pg_registry", "_dim_group_names"):
    if _name not in inspect.getsource(DeviceMesh):
        raise lacking(f"DeviceMesh.{_name}")


def nccl_parts() -> list[Any]:
    """What NCCL does of the process groups of this process, in the order in which torch ends them."""
    if not dist.is_nccl_available():
        return []
    names = cast(Any, distributed_c10d)._world.pg_names
    backends = [_on_cuda(group) for group in sorted(names, key=lambda group: str(names[group]), reverse=True)]
    return [one for one in backends if isinstance(one, cast(Any, dist).ProcessGroupNCCL)]


def _on_cuda(group: Any) -> Any:
    try:
        return group._get_backend(torch.device("cuda"))
    except RuntimeError:  # none for this device
        return None


def abort_nccl() -> None:
    """End the collectives that NCCL runs or has been asked for, with any values; every later one raises.

    From any thread: it ends the wait of another one for a device on which a collective waits for a rank. Waits until
    that is done, for no other rank.
    """
    parts = nccl_parts()
    if parts:
        parts[0]._group_start()  # or the ends of two communicators would wait for each other
        for part in parts:
            part.abort()
        parts[0]._group_end()


def refuse_other_groups(groups: Iterable[FSDPParamGroup]) -> None:
    """UnsupportedError if units are sharded over other ranks than those of the default process group, in its order."""
    for mesh in _meshes(groups):
        ranks = mesh.mesh.flatten().tolist()
        if mesh.ndim != 1 or ranks != list(range(dist.get_world_size())):
            raise UnsupportedError(
                f"recovery is for models sharded over all ranks of the job, on a 1-D mesh; this mesh is {mesh}"
            )


def drop_groups(groups: Iterable[FSDPParamGroup]) -> None:
    """End and drop all process groups, and what the units hold of them. Waits for no rank.

    NCCL's communicators are aborted only: to destroy them torch waits for what they run, and NCCL for all ranks.
    """
    groups = list(groups)
    for info in _infos(groups):
        for name in _GROUPS:
            if hasattr(info, name):
                setattr(info, name, None)
    for mesh in _meshes(groups):
        mesh._pg_registry.clear()
    if not dist.is_initialized():
        return
    for group in gloo_groups(dist.get_rank()):  # another rank may still wait in one; a program may keep one
        close_connections(group)
    if nccl_parts():
        cast(Any, distributed_c10d)._abort_process_group()
    else:
        dist.destroy_process_group()


def gloo_groups(rank: int) -> list[Any]:
    """The process groups in which gloo connects this process to `rank` (global)."""
    world = cast(Any, distributed_c10d)._world
    found = [group for group, backends in dict(world.pg_backend_config).items() if "gloo" in backends]
    return [one for one in found if one not in _cut_short and rank in world.pg_group_ranks.get(one, ())]


def close_connections(group: Any) -> None:
    """Close what gloo has connected for `group`. On any thread; waits for no other rank.

    What other ranks wait for on them fails at once. Destroying the group would close them too, but gloo first waits
    until nothing is left to be read, and never reads what a live rank has sent for a collective that failed here. One
    receive that is late makes it close all of the group's connections; one from any rank connects to none.
    """
    with contextlib.suppress(RuntimeError):  # late, or closed before
        work: Any = dist.irecv(torch.empty(1, device="cpu"), group=group, tag=_NEVER_SENT)
        work.wait(timedelta(milliseconds=1))


def keep_for_ever() -> None:
    """Never let the default process group be destroyed: its ranks have not all been connected to each other.

    A context of gloo's that connects lazily waits, in its destructor, until nothing is readable on any of its sockets,
    from which it takes none away any more; where a connection was cut short that may never be.
    """
    _cut_short.append(dist.group.WORLD)


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
