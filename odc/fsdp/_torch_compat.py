"""Every private torch name that odc touches, checked at import, which fails and names what is missing.

Where supported versions differ, the code asks which names exist, never for a version number.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d, fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from odc.errors import UnsupportedError

P = ParamSpec("P")
R = TypeVar("R")


class Resettable(Protocol):
    """What is reset with a root's iteration: its parameter groups."""

    def give_up(self) -> None: ...


_SUPPORTED = ("2.11", "2.15")


def lacking(missing: str) -> ImportError:
    """The error of an import where the installed torch has not what odc builds on."""
    return ImportError(
        f"odc supports torch {_SUPPORTED[0]} to {_SUPPORTED[-1]}; torch {torch.__version__} lacks {missing} that odc "
        "builds on. Install a supported torch or a newer odc."
    )


try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, FSDPMeshInfo, TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext
except ImportError as error:
    raise lacking(str(error)) from error

# torch 2.15's; a handle of odc's is one where torch has it.
GradientReductionHandle: Any = getattr(fsdp, "GradientReductionHandle", object)

__all__ = [
    "FSDPMeshInfo", "FSDPModule", "FSDPParam", "FSDPParamGroup", "FSDPState", "TrainingState", "torch_fully_shard",
]  # fmt: skip

# Every name of torch's objects that is used below and that torch does not promise to keep. Names found on the class
# (methods, properties, annotated attributes), and attributes found among the names that a method's code stores.
_ON_CLASS: dict[type, tuple[str, ...]] = {
    FSDPParamGroup: (
        "unshard", "wait_for_unshard", "pre_forward", "pre_backward", "post_backward", "finalize_backward",
        "_to_unsharded", "_to_sharded", "is_unsharded", "is_sharded", "_record_post_forward",
    ),
    FSDPState: ("_lazy_init",),
    FSDPParam: (
        "init_all_gather_outputs", "alloc_all_gather_outputs", "init_unsharded_param", "free_unsharded_param",
        "unsharded_grad_data", "to_sharded_dtensor", "_sharded_local_tensor",
        "orig_dtype", "param_dtype", "reduce_dtype", "_orig_size", "sharded_size", "contiguous_sharded_stride",
        "padded_sharded_param_size", "_sharded_param_data", "sharded_param", "_unsharded_param",
    ),
    FSDPModule: ("_get_fsdp_state",),
    DataParallelMeshInfo: ("mesh",),
    ParamModuleInfo: ("param_name", "module", "shared_modules"),
}  # fmt: skip
_STORED: dict[tuple[type, str], tuple[str, ...]] = {
    (FSDPParamGroup, "__init__"): (
        "fsdp_params", "mesh_info", "comm_ctx", "reduce_grads", "gradient_divide_factor", "unshard_in_backward",
        "_training_state", "_sharded_state", "_module_fqn", "modules", "device",
    ),
    (FSDPState, "__init__"): ("_is_root", "_state_ctx", "_comm_ctx", "_training_state", "_modules_to_run_forward"),
    (FSDPState, "init"): ("_modules",),
    (FSDPStateContext, "__init__"): (
        "all_states", "iter_forward_root", "is_last_backward", "post_backward_final_callback_queued",
        "post_optim_event",
    ),
    (FSDPCommContext, "lazy_init"): ("post_forward_order", "all_gather_stream", "reduce_scatter_stream"),
    (FSDPMeshInfo, "__post_init__"): ("shard_mesh_size", "shard_mesh_rank", "shard_process_group"),
    (FSDPParam, "__init__"): ("all_gather_outputs", "_param_fqn", "_module_info"),
    (FSDPParam, "_init_sharded_param"): ("fsdp_placement",),
}  # fmt: skip
_ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "distributed_c10d": (distributed_c10d, "_get_default_store"),
    "autograd.Variable": (torch.autograd.Variable, "_execution_engine"),
    "_C": (torch._C, "_current_graph_task_id", "_are_functorch_transforms_active", "_DisableFuncTorch"),
    "autograd": (torch.autograd, "_unsafe_preserve_version_counter"),
    "DeviceMesh": (DeviceMesh, "_flatten"),
}

# Names that only some supported versions have, and whether the installed torch is one of them.
# Before 2.15 a gradient that was upcast to the reduce dtype moves from the parameter to an attribute of its own.
ACCUMULATES_APART = hasattr(FSDPParam, "to_accumulated_grad_if_needed")
_OF_ACCUMULATION = ("unsharded_accumulated_grad", "unsharded_accumulated_grad_data")
# From 2.15 on a parameter may set the dtype of its gradient (`Tensor.grad_dtype`).
HAS_GRADIENT_DTYPE = "sharded_grad_dtype" in inspect.get_annotations(FSDPParam)
_OF_GRADIENT_DTYPE = ("sharded_grad_dtype", "_has_sharded_grad_dtype_override")


def _stored(owner: type, method: str) -> tuple[str, ...]:
    """Names in the code of a method; nothing if there is no such method."""
    function = inspect.unwrap(getattr(owner, method, _check))
    return function.__code__.co_names if function is not _check else ()


def _check() -> None:
    missing = [
        f"{owner.__name__}.{name}"
        for owner, names in _ON_CLASS.items()
        for name in names
        if not hasattr(owner, name) and name not in inspect.get_annotations(owner)
    ]
    for (owner, method), names in _STORED.items():
        known = _stored(owner, method)
        missing += [f"{owner.__name__}.{name}" for name in names if name not in known]
    of_param = {*_stored(FSDPParam, "__init__"), *dir(FSDPParam), *inspect.get_annotations(FSDPParam)}
    varying = (_OF_ACCUMULATION if ACCUMULATES_APART else ()) + (_OF_GRADIENT_DTYPE if HAS_GRADIENT_DTYPE else ())
    missing += [f"FSDPParam.{name}" for name in varying if name not in of_param]
    if not {"_fsdp_param_groups", "_fsdp_param_group"} & {*_stored(FSDPState, "__init__")}:
        missing.append("FSDPState._fsdp_param_groups")
    for where, (whole, *parts) in _ELSEWHERE.items():
        missing += [f"{where}.{name}" for name in parts if not hasattr(whole, name)]
    if missing:
        raise lacking(", ".join(missing))


_check()


def state_of(module: FSDPModule) -> FSDPState:
    """The state torch keeps of one sharded module."""
    return module._get_fsdp_state()


def groups_of_state(state: FSDPState) -> list[FSDPParamGroup]:
    """The parameter groups of one sharded module: none, one, or (per-parameter meshes, torch >= 2.12) several."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def lazy_init(module: FSDPModule) -> FSDPState:
    """Make `module` the root of its tree, as its first forward would. Calls no collective."""
    state = state_of(module)
    cast(Any, state)._lazy_init()
    return state


def is_root(state: FSDPState) -> bool | None:
    """None before the tree's first use."""
    return state._is_root


def groups_of_root(state: FSDPState) -> list[FSDPParamGroup]:
    """Every group below an initialised root, once, in module order, the same on all ranks.

    torch before 2.12 lists the state of several modules in one unit once for each of them.
    """
    return list(dict.fromkeys(group for below in state._state_ctx.all_states for group in groups_of_state(below)))


class UnorderedGroup(FSDPParamGroup):
    """A parameter group that notes no order of forwards, which torch forgets only at the end of a last backward. Amid
    `_to_sharded` and `_to_unsharded` it is neither: the next of them changes all that one, cut short, has left.
    """

    def _record_post_forward(self) -> None:
        """Nothing: odc fetches ahead in an order of its own."""

    def _to_sharded(self) -> None:
        if not self.is_sharded:
            self._sharded_state = cast(Any, None)
            super()._to_sharded()

    def _to_unsharded(self) -> None:
        if not self.is_unsharded:
            self._sharded_state = cast(Any, None)
            super()._to_unsharded()


class Iteration:
    """What torch keeps of one initialised root during an iteration, and clears only if no exception comes between."""

    def __init__(self, state: FSDPState) -> None:
        self._root: Any = state

    def is_last_backward(self) -> bool:
        """Whether the next backward ends the minibatch; see `FSDPModule.set_is_last_backward`."""
        return bool(self._root._state_ctx.is_last_backward)

    def post_optim_event(self) -> object | None:
        """What `FSDPModule.set_post_optim_event` was given; the root's forward waits for it too, and clears it."""
        return self._root._state_ctx.post_optim_event  # type: ignore[no-any-return]

    def final_callback_queued(self) -> bool:
        """Whether torch's final callback is still to come in the running backward."""
        return bool(self._root._state_ctx.post_backward_final_callback_queued)

    def backward_cut_short(self) -> bool:
        """Whether a backward ended with an exception; to be asked outside of a backward."""
        return self.final_callback_queued() and not is_in_backward()

    def cut_short_last(self) -> bool:
        """Whether the backward that ended with an exception was marked as the last."""
        return bool(getattr(self._root._state_ctx, "odc_marked_last", True))

    def forward_cut_short(self) -> bool:
        """Whether a forward ended with an exception; to be asked outside of a forward."""
        root = self._root._state_ctx.iter_forward_root
        # A unit of several modules of which one ran alone (a loss in chunks) stays here until the next backward ends.
        return root is not None and len(root._modules) == 1 and not is_in_backward()

    def reset(self, groups: Sequence[Resettable]) -> None:
        """Begin a new iteration: whatever an interrupted one has left is given up, parameters are sharded.

        As `FSDPModule.reset_iter_state` (torch 2.13), on every torch, without what collectives leave behind.
        """
        context = self._root._state_ctx
        for group in groups:
            group.give_up()
        for state in context.all_states:
            state._modules_to_run_forward.clear()
            state._training_state = TrainingState.IDLE
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False


def note_mark(state: FSDPState) -> None:
    """Note in the running backward how it is marked: the loop may mark the next one before an exception is seen to."""
    context: Any = state._state_ctx
    context.odc_marked_last = context.is_last_backward


def make_idle(group: FSDPParamGroup) -> None:
    """The training state of a group that takes part in no forward or backward."""
    group._training_state = TrainingState.IDLE


def outside_functorch(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, run outside of `torch.func`'s transforms, which see what the model computes and not what is fetched
    for it (FSDP2 from torch 2.13).
    """

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._are_functorch_transforms_active():
            return function(*args, **kwargs)
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)

    return outside


def is_in_backward() -> bool:
    """Whether this thread runs inside a backward."""
    return torch._C._current_graph_task_id() != -1


def is_manual(state: FSDPState) -> bool:
    """Whether only `finalize_backward()` ends minibatches. The mark is odc's, since torch has one from 2.15 on only."""
    return getattr(state, "odc_manual", False)


def set_manual(state: FSDPState, manual: bool) -> None:
    """Keep the mark where it lives as long as the module, before the root is built too."""
    cast(Any, state).odc_manual = manual


def is_synced(state: FSDPState) -> bool:
    """What `set_requires_gradient_sync` was last given."""
    return getattr(state, "odc_synced", True)


def set_synced(state: FSDPState, synced: bool) -> None:
    """Note what `set_requires_gradient_sync` is given."""
    cast(Any, state).odc_synced = synced


def states_below(root: FSDPState) -> list[FSDPState]:
    """The states of an initialised root's tree, without its own."""
    return [state for state in root._state_ctx.all_states if state is not root]


def forget_forward_order(module: FSDPModule) -> None:
    """Forget the order of forwards below a root, as torch does when a backward is the last."""
    state_of(module)._comm_ctx.post_forward_order.clear()


def mesh_of(group: FSDPParamGroup) -> tuple[tuple[int, ...], int, bool]:
    """(global ranks by replica and shard, shards, whether there is a shard dimension at all) of a group's mesh.

    A rank's shard is its number in the process group of its replica, which torch sorts, not its place in the mesh.
    UnsupportedError if torch gave this rank another shard.
    """
    info = group.mesh_info
    ranks = [int(rank) for rank in info.mesh.mesh.flatten().tolist()]
    if not isinstance(info, FSDPMeshInfo):
        return tuple(ranks), 1, False
    shards, mine = int(info.shard_mesh_size), dist.get_process_group_ranks(info.shard_process_group)
    # Of the groups of other replicas this rank knows the ranks alone.
    replicas = sorted(sorted(ranks[i : i + shards]) for i in range(0, len(ranks), shards))
    replicas = [mine] if len(replicas) == 1 else replicas
    if mine not in replicas or mine.index(dist.get_rank()) != info.shard_mesh_rank:
        raise UnsupportedError(
            f"rank {dist.get_rank()} has shard {info.shard_mesh_rank} in a process group of ranks {mine}; on a 2-D "
            "mesh the ranks of a process group must rise"
        )
    return tuple(rank for replica in replicas for rank in replica), shards, True


def is_hybrid(group: FSDPParamGroup) -> bool:
    """Whether a group's mesh has replicas of its shards, perhaps one."""
    return group.mesh_info.mesh.ndim == 2


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """The 1-D mesh of all ranks of a mesh with dimension names; the same object every time."""
    return mesh._flatten()


def device_of(group: FSDPParamGroup) -> torch.device:
    """Where the group's parameters are trained."""
    return group.device


def lane_streams(state: FSDPState) -> dict[str, Any]:
    """The streams of an initialised root in which torch gathers and reduces, by odc's lane."""
    context: Any = state._comm_ctx
    return {"fetch": context.all_gather_stream, "push": context.reduce_scatter_stream}


def unit_name(group: FSDPParamGroup) -> str:
    return group._module_fqn or "(root)"


def is_forward(group: FSDPParamGroup) -> bool:
    return group._training_state == TrainingState.FORWARD


def is_pre_backward(group: FSDPParamGroup) -> bool:
    return group._training_state == TrainingState.PRE_BACKWARD


def to_unsharded(group: FSDPParamGroup) -> None:
    """Register the unsharded parameters on the modules; their data must be in place."""
    cast(Any, group)._to_unsharded()


def to_sharded(group: FSDPParamGroup) -> None:
    """Register the sharded parameters on the modules and free the unsharded ones."""
    cast(Any, group)._to_sharded()


def torch_finalize(group: FSDPParamGroup) -> None:
    """The end, as torch has it, of a minibatch for one group, without odc's part."""
    FSDPParamGroup.finalize_backward(group)


def default_store() -> Any:
    """The key-value store of the default process group."""
    return distributed_c10d._get_default_store()


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` at the end of the running backward, after every callback queued so far; at once where none runs,
    as when a stage of a pipeline ends a minibatch.
    """
    if is_in_backward():
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    else:
        callback()
