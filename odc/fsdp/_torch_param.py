"""What odc reads and writes of one torch `FSDPParam`. Its private names are checked by `_torch_compat` at import."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from odc.fsdp._torch_compat import ACCUMULATES_APART, HAS_GRADIENT_DTYPE, FSDPParam, FSDPParamGroup


class ShardedParam:
    """One sharded parameter of a group."""

    def __init__(self, param: FSDPParam, group: FSDPParamGroup) -> None:
        self._param, self._group = param, group
        self.shard_dim: int = param.fsdp_placement.dim

    @property
    def name(self) -> str:
        return self._param._param_fqn or self._param._module_info.param_name

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded DTensor parameter that optimizers see."""
        return self._param.sharded_param

    @property
    def padded_numel(self) -> int:
        return self._param.padded_sharded_param_size.numel()

    @property
    def shape(self) -> torch.Size:
        """Of the whole (local to tensor parallelism) parameter."""
        return self._param._orig_size

    @property
    def holders(self) -> tuple[nn.Module, ...]:
        """The modules that have it as a parameter of their own: one, or several that share it."""
        info = self._param._module_info
        return (info.module, *info.shared_modules)

    @property
    def embeds(self) -> bool:
        """Whether an `nn.Embedding` holds the parameter, perhaps beside other modules."""
        return any(isinstance(holder, nn.Embedding) for holder in self.holders)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._param.param_dtype or self._param.orig_dtype

    @property
    def own_dtype(self) -> torch.dtype:
        return self._param.sharded_param.dtype

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Of the sharded `.grad`."""
        kept = self._kept_in(self.own_dtype)
        if kept is None:
            # An explicit None leaves `.grad` in the dtype of the reduction, which a group's parameters share.
            trained = [one for one in params_of(self._group) if one.parameter.requires_grad]
            return functools.reduce(torch.promote_types, [one._summed_in() for one in trained], self._summed_in())
        return kept

    def _kept_in(self, unset: torch.dtype) -> torch.dtype | None:
        """The parameter's `grad_dtype`: `unset` where it has not been set, None where any dtype is accepted."""
        param: Any = self._param  # the installed torch may lack these names
        overridden = HAS_GRADIENT_DTYPE and param._has_sharded_grad_dtype_override
        return param.sharded_grad_dtype if overridden else unset

    def _summed_in(self) -> torch.dtype:
        """What torch brings this parameter's gradient to before it is reduced with the group's others."""
        return self.reduce_dtype or self._kept_in(self._param.orig_dtype) or self.compute_dtype

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """As the mixed precision policy has it; None where it is the compute dtype."""
        return self._param.reduce_dtype

    @property
    def has_extension(self) -> bool:
        """Whether a tensor subclass transforms the shard around the all-gather (float8 and the like)."""
        return hasattr(self._param._sharded_local_tensor, "fsdp_pre_all_gather")

    def shard(self) -> torch.Tensor:
        """This rank's padded shard, 1-D, in its own dtype."""
        return self._param._sharded_param_data

    def allocate(self, shards: int) -> torch.Tensor:
        """Storage of the unsharded parameter, 1-D [shards * padded shard] in compute dtype, unfilled."""
        param = self._param
        if not param.all_gather_outputs:
            with torch.inference_mode(False):  # an inference tensor could not be trained on later
                device = param.sharded_param.device
                param.init_all_gather_outputs([self.padded_numel], [self.compute_dtype], shards, device)
        param.alloc_all_gather_outputs()
        return param.all_gather_outputs[0]

    def rearrange(self, by_shard: torch.Tensor, shards: int) -> None:
        """Fill the unsharded parameter from `by_shard` when it is sharded along another dimension than the first."""
        size = list(self._param.padded_sharded_param_size)
        first = [size[0] * shards, *size[1:]]
        chunks = torch.chunk(by_shard.view(first), shards, dim=0)
        whole = list(size)
        whole[self.shard_dim] *= shards
        target = self._param.all_gather_outputs[0]
        preserve: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
        with torch.no_grad(), preserve(target):
            torch.cat(chunks, dim=self.shard_dim, out=target.view(whole))

    @property
    def was_unsharded(self) -> bool:
        """Whether the unsharded parameter has been made, which happens at the unit's first use and lasts."""
        return hasattr(self._param, "_unsharded_param")

    def ready(self) -> None:
        """Make the unsharded parameter of the filled storage; once made, it is a view of whatever is filled in."""
        if not self.was_unsharded:
            with torch.inference_mode(False):
                self._param.init_unsharded_param()

    def free(self) -> None:
        if not getattr(self._param, "keep_unsharded_storage", False):
            self._param.free_unsharded_param()

    def take_gradient(self) -> torch.Tensor | None:
        """The unsharded gradient in its own dtype, local to tensor parallelism; torch no longer holds it afterwards."""
        param = self._param
        if ACCUMULATES_APART and param.unsharded_accumulated_grad is not None:
            grad = param.unsharded_accumulated_grad_data
            param.unsharded_accumulated_grad = None
            return grad
        if self.was_unsharded and param._unsharded_param.grad is not None:
            grad = param.unsharded_grad_data
            param._unsharded_param.grad = None
            return grad
        return None

    def add_gradient(self, flat: torch.Tensor, first: int) -> None:
        """Add elements of `flat` from `first` on to the sharded `.grad` (or make it), and run its hooks.

        `flat` is 1-D in `gradient_dtype`; a fresh `.grad` is a view of it.
        """
        param = self._param
        start = flat.storage_offset() + first  # a part of a heap does not begin its storage
        grad = torch.as_strided(flat, param.sharded_size, param.contiguous_sharded_stride, start)
        if param.sharded_param.grad is None:
            param.sharded_param.grad = param.to_sharded_dtensor(grad)
        else:
            cast(Any, param.sharded_param.grad)._local_tensor.add_(grad)
        hooks = getattr(param.sharded_param, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            hook(param.sharded_param)

    def move_gradient(self, lies_there: Callable[[torch.Tensor], bool]) -> None:
        """Give `.grad`, which stays the same DTensor, memory of its own if its local part `lies_there`."""
        grad: Any = self._param.sharded_param.grad
        if grad is not None and lies_there(grad._local_tensor):
            grad._local_tensor = grad._local_tensor.clone()


def params_of(group: FSDPParamGroup) -> Iterator[ShardedParam]:
    """The parameters of a group, in torch's order."""
    return (ShardedParam(param, group) for param in group.fsdp_params)
