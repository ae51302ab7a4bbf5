"""Attention kept inside each document of a packed row: torch's causal SDPA, once per document.

The lengths reach the layers as the keyword argument `cu_seq_lens_q`, the one transformers' FlashAttention takes:
activation checkpointing keeps it for its recompute.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention

from odc.errors import UnsupportedError

NAME = "odc_documents"


def register() -> str:
    """Make `attn_implementation="odc_documents"` known to transformers and return that name. May be called again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, document_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME


@torch.compiler.disable  # type: ignore[untyped-decorator]
def document_attention(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document, as a transformers attention function; `module` is not used.

    `query` is [B, heads, T, width]; `key` and `value` may have fewer heads (grouped-query attention). `cu_seq_lens_q`,
    int [documents + 1], says where each document starts, and T, and needs B = 1; without it each row is one document.
    Documents must not be longer than `sliding_window`. Returns [B, T, heads, width] and None. Raises UnsupportedError
    for masks, windows, and incremental decoding of several tokens at once.
    """
    rows, length = query.shape[0], query.shape[2]
    if attention_mask is not None:
        raise UnsupportedError("attention per document takes no attention mask; pack documents without padding")
    if key.shape[2] != length:
        if length != 1:
            raise UnsupportedError("attention per document has no cache; set_attn_implementation('sdpa') to generate")
        # One new token sees the whole cache: nothing to mask.
        output = scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2).contiguous(), None
    starts = [0, length] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    if starts[0] != 0 or starts[-1] != length or (cu_seq_lens_q is not None and rows != 1):
        raise UnsupportedError(f"document starts {starts} do not fit {rows} row(s) of {length} tokens")
    lengths = [end - start for start, end in pairwise(starts)]
    if sliding_window is not None and max(lengths) > sliding_window:
        raise UnsupportedError(
            f"a document of {max(lengths)} tokens exceeds the model's sliding window of {sliding_window}"
        )
    shared = key.shape[1] != query.shape[1]
    # Not slices: the gradient of a slice is as large as the whole row, that of a split is joined once.
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [
        scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=shared
        ).transpose(1, 2)
        for q, k, v in parts
    ]
    return (outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


def _no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    """The mask transformers would build: none. A padding mask that hides a token is refused."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedError(
            "attention per document takes no padding; pack documents instead (odc.experiments.data.packing)"
        )
