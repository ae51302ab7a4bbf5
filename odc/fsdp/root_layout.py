"""What a root consists of, read from its modules: the calls of `fully_shard`, settings, rank grid, units, heap.

The calls are kept in weak references outside the modules, so nothing of odc shows up in a state dict or a pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from odc.errors import OdcError, UnsupportedError
from odc.fsdp import _torch_compat as compat
from odc.fsdp.group import OdcParamGroup
from odc.memory import ShmHeap, SymmetricHeap
from odc.memory.cores import enough_cores
from odc.net import JobStore
from odc.net.announced import process_of
from odc.protocol import RankGrid, UnitSpec, accumulator_dtype
from odc.protocol.rounding import coarse_parameters
from odc.runtime import Rendezvous
from odc.settings import Settings

_entries: weakref.WeakKeyDictionary[nn.Module, ShardCall] = weakref.WeakKeyDictionary()
_calls: Counter[tuple[int, ...]] = Counter()
_THREADS = 3  # of a rank that may wait for its device at once: the one that trains, the one that pushes, the daemon


@dataclass(frozen=True)
class ShardCall:
    """One call of `fully_shard`, the `sequence`-th on a mesh of these ranks; `settings` are None to take the root's."""

    sequence: int
    settings: Settings | None


def register(modules: list[nn.Module], ranks: tuple[int, ...], settings: Settings | None) -> None:
    """Note a call of `fully_shard` on `modules` over a mesh of `ranks`, whose order does not count."""
    members = tuple(sorted(ranks))
    entry = ShardCall(_calls[members], settings)
    _calls[members] += 1
    for module in modules:
        _entries[module] = entry


def sharded_modules() -> list[nn.Module]:
    """Every module that was sharded and still lives."""
    return list(_entries)


def registered(module: object) -> ShardCall:
    """The call that sharded `module`."""
    return _entries[module]  # type: ignore[index]


def forget_calls() -> None:
    """Count calls from 0 again, in a process that has shut down and joins another job, whose ranks all begin at 0."""
    _calls.clear()


def calls_below(module: compat.FSDPModule) -> list[int]:
    """Numbers of the calls of `fully_shard` that made the tree of `module`."""
    sharded = [m for m in cast(nn.Module, module).modules() if isinstance(m, compat.FSDPModule)]
    return sorted({registered(one).sequence for one in sharded})


def agreed_settings(module: compat.FSDPModule, call: ShardCall) -> Settings:
    """The settings of the root that `call` sharded; raises ValueError where a module below has others."""
    settings = call.settings or Settings()
    for name, below in cast(nn.Module, module).named_modules():
        if not isinstance(below, compat.FSDPModule) or below is module:
            continue
        own = registered(below).settings
        if own is not None and own != settings:
            raise ValueError(f"settings of {name!r} conflict with those of the root: {own} against {settings}")
    return settings


def grid_of(groups: list[OdcParamGroup], rank: int) -> RankGrid:
    """The mesh that all groups share; refuses groups on different meshes."""
    if not groups:
        raise UnsupportedError("a root without parameters has nothing to shard")
    ranks, shards, has_shards = compat.mesh_of(groups[0])
    for group in groups:
        if not isinstance(group, OdcParamGroup):
            raise UnsupportedError(f"unit {compat.unit_name(group)!r} was sharded by torch's fully_shard, not by odc's")
        if compat.mesh_of(group) != (ranks, shards, has_shards):
            raise UnsupportedError(
                f"unit {compat.unit_name(group)!r} is on another mesh (ranks {compat.mesh_of(group)[0]}) than unit "
                f"{compat.unit_name(groups[0])!r} (ranks {ranks}); units of one root must share a mesh"
            )
        if group.odc_node_size != groups[0].odc_node_size:
            raise UnsupportedError(
                f"units {compat.unit_name(group)!r} and {compat.unit_name(groups[0])!r} were given different meshes or "
                "optimizer_sharding; units of one root must share both"
            )
    if rank not in ranks:
        raise OdcError(f"rank {rank} is not on the mesh of ranks {ranks} that it shards over")
    return RankGrid(ranks, shards, ranks.index(rank), node_size=groups[0].odc_node_size)


def units_of(groups: Sequence[OdcParamGroup], settings: Settings) -> list[UnitSpec]:
    """The layouts of all groups of a root."""
    params = [param for group in groups for param in group.odc_params]
    found = [(param.shape, param.embeds) for param in params] if settings.sums_dtype == "int8" else []
    coarse = {id(param) for param, may in zip(params, coarse_parameters(found), strict=False) if may}
    return [
        unit_of(i, group, settings, {param.name for param in group.odc_params if id(param) in coarse})
        for i, group in enumerate(groups)
    ]


def unit_of(index: int, group: OdcParamGroup, settings: Settings, coarse: Collection[str]) -> UnitSpec:
    """The layout of one group; `coarse` are names of parameters whose sums cross to other hosts as int8."""
    name = compat.unit_name(group)
    for param in group.odc_params:
        if param.has_extension:
            raise UnsupportedError(f"unit {name!r}: {param.name} has all-gather extensions (float8?): not supported")
    params = [(param.name, param.padded_numel, param.compute_dtype) for param in group.odc_params]
    # A parameter that was trained when it was sharded counts, frozen or not: adapters are frozen to evaluate the base.
    trained = [
        param
        for param, before in zip(group.odc_params, group.odc_trained, strict=True)
        if before or param.parameter.requires_grad
    ]
    frozen = {name for name, _, _ in params} - {param.name for param in trained}
    wide = any(torch.float64 in (param.own_dtype, param.reduce_dtype, param.gradient_dtype) for param in trained)
    own, sums = {param.name: param.own_dtype for param in group.odc_params}, settings.reproducible or wide
    return UnitSpec.build(index, name, params, accumulator_dtype(sums), frozen, coarse, own)


def identity_of(sequence: int, grid: RankGrid) -> str:
    """Names the root's heap, the same on every rank, whichever root is run first."""
    ranks = hashlib.sha256(json.dumps([grid.ranks, grid.shards]).encode()).hexdigest()[:8]
    return f"{sequence}.{ranks}"


def _processes_here(grid: RankGrid, settings: Settings) -> list[int]:
    """Ids of the processes of members of the same part of this host, which have announced them (`locate`). Raises as a
    JobStore.
    """
    store = JobStore(compat.default_store(), settings.timeout_s, grid.rank)
    found = [process_of(store, grid.ranks[member]) for member in grid.local]
    return [os.getpid() if process is None else process.pid for process in found]


def open_heap(
    identity: str,
    grid: RankGrid,
    rendezvous: Rendezvous,
    settings: Settings,
    groups: Sequence[compat.FSDPParamGroup],
    state: compat.FSDPState,
) -> SymmetricHeap:
    """An unsealed heap for a root. Raises UnsupportedError for units on several devices."""
    host = ShmHeap(identity, grid.ranks, grid.me, rendezvous.connect, settings.timeout_s)
    device = compat.device_of(groups[0])
    for group in groups:
        if compat.device_of(group) != device:
            name = compat.unit_name(group)
            raise UnsupportedError(f"unit {name!r} is on {compat.device_of(group)}, the first unit on {device}")
    if device.type == "cpu":
        if settings.memory == "nvshmem":
            raise UnsupportedError(
                "Settings(memory='nvshmem') is for models on CUDA, and this one is on the CPU; leave it out"
            )
        return host
    from odc.memory.cuda import CudaHeap
    from odc.memory.cuda_lanes import CudaLanes

    sleeps = not enough_cores(_THREADS, _processes_here(grid, settings))
    lanes = CudaLanes(device, compat.lane_streams(state), sleeps=sleeps)
    if settings.memory == "driver":
        return CudaHeap(host, device, lanes, grid.local)
    from odc.memory.nvshmem_heap import NvshmemHeap
    from odc.runtime.nvshmem import placer

    store, world = compat.default_store(), dist.get_world_size()
    place = placer(store, identity, grid.ranks, settings, grid.rank, world, device)
    return NvshmemHeap(host, device, lanes, place, grid.local)
