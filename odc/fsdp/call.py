"""`fully_shard`: torch's own, called first; then odc changes who communicates.

What odc could not do right later is refused before any module is touched.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypedDict, Unpack, cast, get_args, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from odc.errors import UnsupportedError
from odc.fsdp import _torch_compat as compat
from odc.fsdp import hooks
from odc.fsdp._torch_forward import hook_methods, is_nested
from odc.fsdp._torch_param import params_of
from odc.fsdp.group import adopt
from odc.fsdp.module import OdcModule, add_methods
from odc.fsdp.root import live_roots, root_above, root_at
from odc.fsdp.root_layout import register, sharded_modules
from odc.memory import require_add
from odc.net import JobStore, announce_process
from odc.protocol import RootState
from odc.runtime import await_releases, daemon, end_nvshmem, leave_arenas, stop_daemon
from odc.settings import OptimizerSharding, Settings

_at_exit = False
_joined: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None  # the store of this process's job, and the daemon


class _Options(TypedDict, total=False):
    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: OffloadPolicy | None
    ignored_params: set[nn.Parameter] | None
    optimizer_sharding: OptimizerSharding
    settings: Settings | None


@overload
def fully_shard(module: nn.Module, **options: Unpack[_Options]) -> OdcModule: ...
@overload
def fully_shard(module: list[nn.Module], **options: Unpack[_Options]) -> list[OdcModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    optimizer_sharding: OptimizerSharding = "mesh",
    settings: Settings | None = None,
) -> Any:
    """Shard `module` over `mesh` as torch's `fully_shard` does, with on-demand communication.

    Call it as you call torch's: bottom-up, last on the root, in the same order on every rank of the mesh. Calls no
    collective but to make a default mesh. Arguments not listed are torch's. Returns `module`, now an `OdcModule`.

    Args:
        module: a module, or several to be one unit.
        mesh: 1-D (sharded) or 2-D (replicated x sharded), cpu or cuda; None: the world, on cuda if available, as torch.
        reshard_after_forward: as torch; a number of ranks is taken as True (there is no gather over fewer ranks).
        shard_placement_fn: as torch; may return `Shard(dim)`, all on the same mesh.
        offload_policy: only torch's default.
        optimizer_sharding: with "world" on a 2-D mesh, parameters, gradients and optimizer states are DTensors sharded
            over all its ranks, as on a 1-D mesh; what the forward fetches, and where the backward pushes, stays in the
            shard dimension. A 1-D mesh shards that way over hosts without it. Same on all units of a root.
        settings: of the runtime; the root's hold for its tree, others must agree or be None.

    Raises:
        TypeError: `settings` are no `Settings`.
        ValueError: an unknown `optimizer_sharding`.
        UnsupportedError: a mesh, policy, class or mix of dtypes that odc cannot do right, or a queue without libatomic.
    """
    _watch_exit()
    _refuse_options(settings, offload_policy)
    mesh = _default_mesh() if mesh is None else mesh
    _refuse_mesh(mesh)
    mesh, node_size = _divide(mesh, optimizer_sharding, settings or Settings())
    modules = module if isinstance(module, list) else [module]
    _refuse_classes(modules)
    _refuse_sharded_above(modules)
    _refuse_late(modules)
    _refuse_mixed_dtypes(modules, ignored_params or set())
    whole = reshard_after_forward if isinstance(reshard_after_forward, bool) or reshard_after_forward is None else True
    compat.torch_fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=whole,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        ignored_params=ignored_params,
    )
    for group in compat.groups_of_state(compat.state_of(cast(compat.FSDPModule, modules[0]))):
        adopt(group, root_above, node_size)
    for one in modules:
        _hook(one)
    register(modules, tuple(int(r) for r in mesh.mesh.flatten().tolist()), settings)
    join_job(dist.get_rank(), settings)
    return module


# torch's own function: the state of a sharded module, None of any other module.
cast(Any, fully_shard).state = cast(Any, compat.torch_fully_shard).state


def _hook(module: nn.Module) -> None:
    """What odc adds to a module that torch has sharded."""
    add_methods(module)
    # Of a compiled block too the hook runs as it is: traced, it would have every weak dictionary of torch as input.
    before: Any = torch.compiler.disable(_before_forward)
    module.register_forward_pre_hook(before, prepend=True)
    hook_methods(cast(compat.FSDPModule, module), before)
    groups = compat.groups_of_state(compat.state_of(cast(compat.FSDPModule, module)))
    parts = (holder for group in groups for param in params_of(group) for holder in param.holders)
    for part in {module, *parts}:  # the weights of a part alone may be loaded, too
        part.register_load_state_dict_pre_hook(_before_load)


def _watch_exit() -> None:
    """Before any check, so that an error on this rank alone reaches the peers."""
    if dist.is_initialized():
        hooks.watch_exit(compat.default_store(), dist.get_rank())


def join_job(rank: int, settings: Settings | None) -> None:
    """What a process needs from its first sharded module on, and again in each new process group."""
    global _joined, _at_exit
    server, store = daemon(rank), compat.default_store()
    if _joined is None or _joined[0]() is not store or _joined[1]() is not server:  # a forked child has another daemon
        announce_process(JobStore(store, (settings or Settings()).timeout_s, rank), rank)
        _joined = weakref.ref(store), weakref.ref(server)
        hooks.end_collectives_at_a_loss(server.liveness)
    server.watch_hosts(store, settings, dist.get_world_size())
    hooks.guard_steps()
    if not _at_exit:
        atexit.register(shutdown)
        _at_exit = True


def shutdown() -> None:
    """Shut this rank down: peers that wait for it get an error, heaps are closed, the daemon stops. Runs at exit too.

    On this rank only; calls no collective. Sharded modules must not be run after it. Waits until no peer needs this
    rank's shards any more, over hosts not after an evaluation. WaitTimeoutError if a peer, which is named, was given up
    after `Settings.timeout_s`; this rank has shut down all the same. Where an error is being handled or ends the
    process, peers get it as the reason, and no rank is waited for.
    """
    failed = hooks.ended_by_error()
    for root in live_roots():
        root.shut_down(hooks.last_error() or root.minibatch.left_unfinished())
    leave_arenas()
    try:
        if not failed:
            await_releases()
    finally:
        stop_daemon()
        end_nvshmem(failed)


def _default_mesh() -> DeviceMesh:
    """Over the world, on the device on which this process computes."""
    if not dist.is_initialized():
        raise UnsupportedError(
            "fully_shard needs a process group: start the program by torchrun (torchrun --nproc-per-node 2 loop.py) "
            "and call torch.distributed.init_process_group first"
        )
    return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))


def _refuse_options(settings: object, offload_policy: OffloadPolicy | None) -> None:
    if settings is not None and not isinstance(settings, Settings):
        raise TypeError(f"settings must be odc.Settings(...), not {type(settings).__name__} {settings!r}")
    if offload_policy is not None and type(offload_policy) is not OffloadPolicy:
        raise UnsupportedError(f"{type(offload_policy).__name__}: offloading is not supported")
    if settings is not None and settings.queue_bytes:
        require_add()


def _refuse_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim not in (1, 2):
        raise UnsupportedError(f"a {mesh.ndim}-D mesh: fully_shard takes (shard,) or (replicate, shard); got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise UnsupportedError(f"a 2-D mesh needs dimension names, the shard dimension last; got {mesh}")
    if mesh.device_type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device type {mesh.device_type!r}: odc runs on cpu and cuda")


def _divide(mesh: DeviceMesh, optimizer_sharding: str, settings: Settings) -> tuple[DeviceMesh, int]:
    """(the mesh over which torch shards, ranks of a node; 0: of a host)."""
    if optimizer_sharding not in get_args(OptimizerSharding):
        raise ValueError(f"optimizer_sharding must be 'mesh' or 'world', not {optimizer_sharding!r}")
    if optimizer_sharding == "mesh" or mesh.ndim == 1:
        return mesh, 0
    ranks = mesh.mesh.flatten().tolist()
    for wrong, what in (
        (mesh.device_type == "cpu" and settings.kernels == "triton", "Settings(kernels='triton') on the CPU"),
        (ranks != sorted(ranks), f"a mesh whose ranks do not rise: {ranks}"),
    ):
        if wrong:
            raise UnsupportedError(f"optimizer_sharding='world' does not go with {what}")
    return compat.flattened(mesh), int(mesh.size(1)) if mesh.size(0) > 1 else 0


def _refuse_classes(modules: list[nn.Module]) -> None:
    """Python lets torch put a class in front of a module's only if that begins with a base whose instances have a
    `__dict__`, which those of ABC and Generic have not; or if its instances have slots.
    """
    for one in modules:
        cls: Any = type(one)
        if cls.__basicsize__ != nn.Module.__basicsize__:
            continue
        while cls.__base__.__dictoffset__:
            cls = cls.__base__
        if (first := cls.__base__) is not object:
            raise UnsupportedError(
                f"class {cls.__name__} of {cls.__module__} has {first.__name__} in front of nn.Module, so Python does "
                f"not let fully_shard extend it; put {first.__name__} behind nn.Module: "
                f"class {cls.__name__}(nn.Module, {first.__name__})"
            )


def _refuse_sharded_above(modules: list[nn.Module]) -> None:
    """A parameter that was sharded with a module above cannot be taken out of its unit again."""
    names = {id(p): name for one in modules for name, p in one.named_parameters() if isinstance(p, DTensor)}
    for above in _sharded_around(modules) if names else ():
        for group in compat.groups_of_state(compat.state_of(cast(compat.FSDPModule, above))):
            taken = [names[id(param.parameter)] for param in params_of(group) if id(param.parameter) in names]
            if taken:
                raise UnsupportedError(
                    f"{taken[0]!r} was sharded already, with the {type(above).__name__} around it: call fully_shard "
                    "bottom-up, on layers first and on the root last"
                )


def _refuse_late(modules: list[nn.Module]) -> None:
    """A unit of a root is there when the root is first used."""
    used = [root.state for root in live_roots()]
    for above in _sharded_around(modules) if used else ():
        if compat.state_of(cast(compat.FSDPModule, above)) in used:
            raise UnsupportedError(
                f"the {type(above).__name__} around {type(modules[0]).__name__} is in use: shard every module of a "
                "model before its first forward, unshard or minibatch"
            )


def _sharded_around(modules: list[nn.Module]) -> Iterator[nn.Module]:
    """Sharded modules that hold any of these."""
    for above in sharded_modules():
        below = {id(module) for module in above.modules() if module is not above}
        if any(id(module) in below for module in modules):
            yield above


def _refuse_mixed_dtypes(modules: list[nn.Module], ignored: set[nn.Parameter]) -> None:
    """A unit's trainable parameters share one dtype; those of units below are DTensors by now, checked before."""
    found: dict[torch.dtype, str] = {}
    below = {
        id(p) for top in modules for m in top.modules() if isinstance(m, compat.FSDPModule) for p in m.parameters()
    }
    for top in modules:
        for name, parameter in top.named_parameters():
            if parameter.requires_grad and id(parameter) not in below and parameter not in ignored:
                if parameter.dtype.is_complex:
                    raise UnsupportedError(
                        f"{name} is {parameter.dtype}: train view_as_real of it, odc adds real numbers"
                    )
                found.setdefault(parameter.dtype, name)
    if len(found) > 1:
        listed = ", ".join(f"{name} is {dtype}" for dtype, name in found.items())
        raise UnsupportedError(f"mixed dtypes in one unit: {listed}; cast them, or shard them as units of their own")


@compat.outside_functorch
def _before_forward(module: nn.Module, args: Any) -> None:
    sharded = cast(compat.FSDPModule, module)
    if compat.is_root(compat.state_of(sharded)) is False or not _has_parameters(sharded):
        return
    if not is_nested(sharded):  # that is part of the pass around it
        root_at(sharded).before_forward()


def _has_parameters(module: compat.FSDPModule) -> bool:
    """Whether anything in the module's tree is sharded; as under torch, a tree without parameters just runs."""
    tree = cast(nn.Module, module).modules()  # the module itself comes first
    return any(compat.groups_of_state(compat.state_of(m)) for m in tree if isinstance(m, compat.FSDPModule))


def _before_load(module: nn.Module, *unused: Any) -> None:
    """New weights are coming: an epoch of evaluation ends, so that the next forward publishes them."""
    for root in live_roots():
        if root.minibatch.state is not RootState.CLOSED and root.has(module):
            root.minibatch.close_evaluation("load_state_dict()")
