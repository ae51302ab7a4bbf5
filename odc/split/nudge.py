"""Weights that differ a little from a model's own while it runs, without a write to the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_FEW = 1 << 16  # elements of a parameter that is always moved; a larger one is moved where all of it is 0
_STEP, _FROM_ZERO = 0.1, 0.1  # of the root mean square of a parameter, and where that is 0
# Functions whose result is computed from their arguments. Others, such as those that free the storage of an unsharded
# parameter or ask for its address, are given the parameter itself.
_COMPUTE = frozenset((
    "linear", "embedding", "conv1d", "conv2d", "conv3d", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum",
    "tensordot", "outer", "dot", "mv", "bilinear", "add", "sub", "rsub", "mul", "div", "true_divide", "pow",
    "maximum", "minimum", "lerp", "addcmul", "addcdiv", "where", "neg", "__add__", "__radd__", "__sub__",
    "__rsub__", "__mul__", "__rmul__", "__div__", "__truediv__", "__rtruediv__", "__rdiv__", "__pow__",
    "__rpow__", "__matmul__", "__rmatmul__", "__neg__", "__getitem__", "layer_norm", "rms_norm", "group_norm",
    "batch_norm", "instance_norm", "native_layer_norm", "tanh", "sigmoid", "exp", "log", "softplus", "softmax",
    "log_softmax", "silu", "relu", "gelu", "abs", "square", "sqrt", "rsqrt", "clamp", "sin", "cos", "float",
    "double", "half", "bfloat16", "to", "type_as", "clone", "contiguous", "view", "reshape", "expand",
    "expand_as", "unsqueeze", "squeeze", "transpose", "permute", "t", "chunk", "split", "unbind", "flatten",
    "unflatten", "repeat", "cat", "concat", "stack", "sum", "mean", "norm",
))  # fmt: skip


class NudgedWeights(TorchFunctionMode):
    """While it is entered, every function that computes with a parameter is given one that is moved a little.

    The same parameter is moved alike at each use, and the model itself is never written to: nothing has to be put
    back, and it makes no difference whether parameters are sharded. Weights with many elements stay as they are
    unless all of them are 0. A kernel that is not a function of torch sees its own weights.

    Attributes:
        dtypes: of all parameters that were computed with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self._noise: dict[torch.Size, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _COMPUTE:
            args = [self._moved(one) for one in args]
            kwargs = {name: self._moved(one) for name, one in kwargs.items()}
        if getattr(func, "__name__", "") == "grad":  # a mode is off in its own functions, and layers may be recomputed
            with self:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _moved(self, given: Any) -> Any:
        if type(given) in (list, tuple):  # of `cat` and the like
            return type(given)(self._moved(one) for one in given)
        if type(given) is not nn.Parameter or not given.is_floating_point() or not given.numel():
            return given  # also the shards of a parameter, which are no plain ones
        self.dtypes.add(given.dtype)
        with torch.no_grad():
            few = given.numel() <= _FEW
            if not few and not _is_zero(given):
                return given
            size = given.float().square().mean().sqrt()
            noise = self._noise_of(given, keep=few)
            step = torch.where(size > 0, size * _STEP, _FROM_ZERO).to(given.dtype) * noise
        return given + step

    def _noise_of(self, like: Tensor, keep: bool) -> Tensor:
        noise = self._noise.get(like.shape)
        if noise is None:
            noise = torch.randn(like.shape, generator=torch.Generator().manual_seed(like.numel()))
            if keep:
                self._noise[like.shape] = noise
        return noise.to(like.device, like.dtype)


def _is_zero(tensor: Tensor) -> bool:
    row = tensor
    while row.ndim > 1:
        row = row[0]
    return not bool(row.any()) and not bool(tensor.any())
