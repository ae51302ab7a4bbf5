"""Every private name of torch that `odc.split` uses, checked at import: flash attention with its log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Given = ParamSpec("Given")
Found = TypeVar("Found")
Block = tuple[Tensor, Tensor, tuple[Any, ...]]

_aten = torch.ops.aten
# Of each operator its arguments, in order, up to the last that is used here, and how many results it has.
_OF_ATTENTION = ("query", "key", "value", "dropout_p", "is_causal")
_OF_BACKWARD = ("grad_out", "query", "key", "value", "out", "logsumexp")
_LENGTHS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k")
_OPERATORS: dict[str, tuple[tuple[str, ...], int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (_OF_ATTENTION, 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": ((*_OF_BACKWARD, "dropout_p", "is_causal"), 3),
    "_scaled_dot_product_flash_attention": ((*_OF_ATTENTION, "return_debug_mask"), 9),
    "_scaled_dot_product_flash_attention_backward": (
        (*_OF_BACKWARD, *_LENGTHS, "dropout_p", "is_causal", "philox_seed", "philox_offset"),
        3,
    ),
}


def _fail(missing: str) -> ImportError:
    return ImportError(
        f"torch {torch.__version__} lacks {missing}, which odc.split builds on. Install a torch that odc supports or a "
        "newer odc."
    )


def _check() -> None:
    for name, (arguments, results) in _OPERATORS.items():
        schema: Any = getattr(getattr(getattr(_aten, name, None), "default", None), "_schema", None)
        given = [argument.name for argument in schema.arguments] if schema is not None else []
        if tuple(given[: len(arguments)]) != arguments or "scale" not in given:
            raise _fail(f"aten.{name}({', '.join(arguments)}, scale)")
        if len(schema.returns) != results:
            raise _fail(f"the {results} results of aten.{name}")


try:
    from torch._C import _current_graph_task_id
    from torch._compile import _disable_dynamo
except ImportError as error:
    raise _fail(str(error)) from error

_check()


def without_dynamo(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """The function, at which a compiled model breaks its graph."""
    return _disable_dynamo(function)


def is_in_backward() -> bool:
    """Whether this thread runs inside a backward, as a recompute does."""
    return _current_graph_task_id() != -1


def has_flash(query: Tensor) -> bool:
    """Whether torch has flash attention for the device and dtype of [batch, heads, tokens, width]."""
    if query.device.type == "cpu":
        return True
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.device.type != "cuda" or not half or query.shape[-1] > 256 or query.shape[-1] % 8:
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(query.device) >= (
        8,
        0,
    )


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
