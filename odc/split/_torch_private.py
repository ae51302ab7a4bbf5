"""Every private name of torch that `odc.split` uses: flash attention that returns its log-sum-exp, and two helpers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed import distributed_c10d

Given = ParamSpec("Given")
Found = TypeVar("Found")
Block = tuple[Tensor, Tensor, tuple[Any, ...]]

_aten = torch.ops.aten


def without_dynamo(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """The function, at which a compiled model breaks its graph."""
    return _disable_dynamo(function)


def default_store() -> Any:
    """The key-value store of the default process group."""
    return distributed_c10d._get_default_store()


def has_flash(query: Tensor) -> bool:
    """Whether torch has flash attention for the device and dtype of [batch, heads, tokens, width]."""
    if query.device.type == "cpu":
        return True
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.device.type == "cuda" and half and query.shape[-1] <= 256 and query.shape[-1] % 8 == 0


def flash(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Block:
    """Attention of one block: output, log-sum-exp [batch, heads, tokens], and what `flash_backward` needs besides."""
    if query.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        return out, lse, ()
    found = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
    return found[0], found[1], tuple(found[2:8])


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    rest: tuple[Any, ...],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of one block; `out` and `lse` are those of attention over all blocks."""
    given = (grad, query, key, value, out, lse)
    if query.device.type == "cpu":
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal, scale=scale)
    else:
        backward = _aten._scaled_dot_product_flash_attention_backward
        found = backward(*given, *rest[:4], 0.0, causal, *rest[4:], scale=scale)
    return found[0], found[1], found[2]
