"""What a sharded module can do beyond torch's `FSDPModule`, and what of it is redefined or refused (docs/fsdp.md).

`OdcModule` stands in front of torch's class, so every method that is not named here stays torch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import nn

from odc.errors import UnsupportedError
from odc.fsdp import _torch_compat as compat
from odc.fsdp.boundaries import Claims, GradientReduction, finalize, finish, minibatch, set_manual
from odc.fsdp.group import OdcParamGroup, sharded_groups
from odc.fsdp.root import refuse_mark_below, root_of


def _refuse(what: str, instead: str) -> NoReturn:
    raise UnsupportedError(f"{what} has no meaning under on-demand communication: {instead}")


_MADE = "_made_by_odc"  # an attribute of the classes that `add_methods` makes


class OdcModule(compat.FSDPModule):
    """Mixin of every module that `odc.fully_shard` was called on."""

    def __init_subclass__(cls, **options: Any) -> None:
        if _MADE not in cls.__dict__:  # else torch's class has run the user's hook, which may register classes by name
            super().__init_subclass__(**options)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # torch makes a slice of a sharded ModuleList by constructing its class: give it the original one.
        mro = cls.__mro__
        original = mro[mro.index(compat.FSDPModule) + 1]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    def minibatch(self) -> contextlib.AbstractContextManager[None]:
        """Any number of backwards on this rank, zero included, then one wait for all ranks at exit.

        On the root only, on every rank, once a minibatch. `.grad` is there when the block ends; clip, step and zero
        after it. An exception that leaves the block aborts the job on every rank. If any rank has called
        `abandon_minibatch`, or has caught an exception of a backward that had reached the model, the block's end raises
        AbandonedMinibatchError on every rank; none has a gradient.
        """
        return minibatch(self)

    def claim(self, mine: Sequence[Mapping[str, torch.Tensor]], costs: Sequence[float] | None = None) -> Claims:
        """Microbatches of this minibatch, the costliest first, each computed by whichever rank is free.

        On the root, inside `with model.minibatch():`, once, on every rank, with `Settings(queue_bytes=...)`. Each step
        of the loop claims the next of all ranks' microbatches; every rank goes on to the end. Calls no collective; the
        first step waits until every rank has called it.

        Args:
            mine: microbatches that this rank has loaded, perhaps none, each dense CPU tensors by name; copied.
            costs: of each, in any unit, the same on all ranks; only their order counts. None takes bytes.

        Raises:
            UnsupportedError: no queue, `mine` does not fit into it, or holds what cannot travel.
            OdcError: outside of `minibatch()`, twice in one, or a rank ended the minibatch without calling it.
        """
        return Claims(root_of(self), mine, costs)

    def finish_minibatch(self) -> None:
        """End an open minibatch whose last backward was not marked: waits for all ranks and writes `.grad`.

        On the root, on every rank. `minibatch()` and a last backward do it by themselves.
        """
        finish(self)

    def abandon_minibatch(self, reason: str) -> None:
        """Give the open minibatch up (out of memory, a bad sample): no rank gets a gradient of it. See docs/errors.md.

        On the root, on any rank. All learn of it at the end of the minibatch, from an `AbandonedMinibatchError` with
        this rank and `reason` (about 1,000 bytes are kept). In a plain loop this call ends the minibatch: it waits for
        all ranks, and the error leaves the others' last backward, and this call where the failed backward, or the next
        one, is marked as not the last (`set_is_last_backward(False)`). Does nothing where no minibatch is open.
        """
        root_of(self).minibatch.abandon(reason)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """With True, `finalize_backward()` ends minibatches; no backward does, whatever it is marked as. torch 2.15's.

        On the root, before the first backward of a minibatch; else OdcError.
        """
        set_manual(self, enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReduction | None:
        """End a minibatch of any number of backwards, zero included: waits for all ranks and writes `.grad`.

        On the root, on every rank, in manual mode, outside of a backward and of `with model.minibatch()`; else
        OdcError. After `set_requires_gradient_sync(False)` it does nothing, and the minibatch goes on. With `async_op`
        it sends everything that peers wait for and returns a handle, whose `wait()` must be called before anything else
        is done with the model.
        """
        return finalize(self, async_op)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """As torch, from 2.15 on: unsharded parameters keep their addresses, and their memory, while resharded.

        Raises UnsupportedError where this torch frees the memory whenever it reshards.
        """
        if not hasattr(compat.FSDPModule, "set_keep_unsharded_storage"):
            raise UnsupportedError(
                f"set_keep_unsharded_storage() needs torch 2.15; torch {torch.__version__} frees the memory of "
                "unsharded parameters whenever it reshards"
            )
        parent: Any = super()
        parent.set_keep_unsharded_storage(keep, recurse=recurse)

    def publish(self) -> None:
        """Show the peers weights that were changed inside an open minibatch, not by an optimizer (EMA swap, edits).

        On the root, on every rank, of several roots in the same order; waits until every rank is done with the last
        published version.
        UnfinishedMinibatchError if gradients were pushed already in this minibatch.
        """
        root_of(self).minibatch.publish()

    def unshard(self, async_op: bool = False) -> Any:
        """As torch; with `async_op` the fetch runs on the fetch thread, else on the caller's."""
        groups = [group for group in compat.groups_of_state(compat.state_of(self)) if isinstance(group, OdcParamGroup)]
        for group in groups:
            group.odc_needed_now = not async_op
        try:
            return super().unshard(async_op)
        finally:
            for group in groups:
                group.odc_needed_now = False

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward ends the minibatch, on the root.

        UnsupportedError on a module below a root that is marked otherwise.
        """
        refuse_mark_below(self, is_last_backward)
        super().set_is_last_backward(is_last_backward)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """FSDP2's accumulation idiom, on the root.

        False means "not the last microbatch": gradients are pushed all the same, no rank is waited for, and no full
        gradients are kept. UnsupportedError as in `set_is_last_backward`.
        """
        if not recurse:
            _refuse("set_requires_gradient_sync(recurse=False)", "a minibatch ends for all units together")
        self.set_is_last_backward(requires_gradient_sync)
        compat.set_synced(compat.state_of(self), requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a hybrid mesh, on the root, as `set_is_last_backward`: replicas are summed at the end of the minibatch.

        FSDP2 writes no gradients before that sum either. On another mesh this has no effect, as in FSDP2.
        """
        if not any(group.odc_node_size or compat.is_hybrid(group) for group in sharded_groups(cast(nn.Module, self))):
            return
        if not recurse:
            _refuse("set_requires_all_reduce(recurse=False)", "a minibatch ends for all units together")
        self.set_is_last_backward(requires_all_reduce and compat.is_synced(compat.state_of(self)))

    def set_custom_all_gather(self, comm: Any) -> None:
        """Refused: there is no all-gather."""
        _refuse("set_custom_all_gather", "parameters are fetched from their owners' heaps")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Refused: there is no reduce-scatter."""
        _refuse("set_custom_reduce_scatter", "gradients are pushed to their owners")

    def set_all_reduce_hook(self, *args: Any, **kwargs: Any) -> None:
        """Refused: there is no all-reduce."""
        _refuse("set_all_reduce_hook", "use a hybrid mesh, or reduce .grad after the minibatch")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refused: no buffers are allocated for collectives."""
        _refuse("set_allocate_memory_from_process_group_for_comm", "the heap is allocated once")

    def set_symm_mem_for_comm(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the heap is symmetric memory already."""
        _refuse("set_symm_mem_for_comm", "the heap is symmetric memory already")

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """No-op: gradients are always summed and divided once."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """As in FSDP2 (torch 2.13), on every torch: whether parameters that no rank has used get a gradient of zeros.

        Parameters that some rank has used have one on every rank anyway; those of a unit that has had no gradient in
        any minibatch so far get none.
        """
        own = compat.groups_of_state(compat.state_of(self))
        for group in sharded_groups(cast(nn.Module, self)):
            if recurse or group in own:
                group.odc_fills_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Without effect but that torch notes it. Raises TypeError or ValueError as torch."""
        if hasattr(compat.FSDPModule, "set_reduce_scatter_max_input_buffers"):
            parent: Any = super()
            parent.set_reduce_scatter_max_input_buffers(max_input_buffers, recurse=recurse)
        elif isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        elif max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")

    def set_separate_reduce_scatter_group(self, *args: Any, **kwargs: Any) -> None:
        """No-op: fetches and pushes never wait for each other."""

    def reset_iter_state(self) -> None:
        """Recover from an exception in forward or backward, as in FSDP2 (torch 2.13), on every torch. On the root.

        Where this rank has pushed gradients in the open minibatch, it gives the minibatch up as `abandon_minibatch`
        does; otherwise no rank notices, and the microbatch can be run again.
        """
        root_of(self).minibatch.reset()


def sharded_tops(model: nn.Module) -> list[OdcModule]:
    """The modules of `model`, itself included, that odc has sharded and that lie in no other sharded one."""
    if isinstance(model, OdcModule):
        return [model]
    return [top for child in model.children() for top in sharded_tops(child)]


def reshard_all(model: nn.Module) -> None:
    """Shards again all that is sharded in `model`, also by torch: a forward without a backward leaves parameters whole,
    in the place of the shards. Does not wait.
    """
    for module in model.modules():
        if isinstance(module, compat.FSDPModule):
            module.reshard()


def add_methods(module: nn.Module) -> None:
    """Put `OdcModule` in front of a module's class; torch's `fully_shard` has put `FSDPModule` there."""
    cls = type(module)
    if not issubclass(cls, OdcModule):
        module.__class__ = _class_of(cls)


_classes: dict[type, type] = {}


def _class_of(cls: type) -> type:
    if cls not in _classes:
        # By torch's name: libraries take "FSDP" off it to find the model's own, as transformers does to save it.
        _classes[cls] = type(cls.__name__, (OdcModule, cls), {"__module__": cls.__module__, _MADE: True})
    return _classes[cls]
