"""Causal attention kept inside each document of a packed row: torch's SDPA, once per document.

Windows, capped scores and sinks run by blocks of queries. The lengths reach the layers as the keyword argument
`cu_seq_lens_q`, the one transformers' FlashAttention takes: activation checkpointing keeps it for its recompute.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from odc.errors import UnsupportedError
from odc.split.models import HARMLESS

NAME = "odc_documents"
# What models pass to every attention beside the arguments that `document_attention` names.
_LENGTHS = frozenset({"cu_seq_lens_k", "max_length_q", "max_length_k"})
_BLOCK_SCORES = 1 << 26  # scores that exist at once: 256 MiB in fp32
_LEAST_ROWS = 64  # queries of a block under a small window


class _Form(NamedTuple):
    """How the scores of a layer differ from plain causal attention's.

    `window` counts the tokens that a token sees, itself included; `softcap` bounds scores; `sinks`, [heads], are the
    scores of a key without a value.
    """

    scale: float | None
    dropout: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def register() -> str:
    """Make `attn_implementation="odc_documents"` known to transformers and return that name. May be called again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, document_attention)
    AttentionMaskInterface.register(NAME, window_mask)
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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document, as a transformers attention function.

    `query` is [B, heads, T, width]; `key` and `value` may have fewer heads (grouped-query attention). `cu_seq_lens_q`,
    int [documents + 1], holds where each document starts, and T, and needs B = 1; without it each row is one document.
    The window is the least of `sliding_window` and that of `window_mask`; `softcap` and `s_aux` (sinks, [heads]) are
    transformers' too. Returns [B, T, heads, width] and None. Raises UnsupportedError for masks, attention that is not
    causal, keywords it does not know, and incremental decoding of several tokens at once.
    """
    rows, length = query.shape[0], query.shape[2]
    unknown = sorted(n for n, one in others.items() if one is not None and n not in HARMLESS and n not in _LENGTHS)
    if unknown:
        raise UnsupportedError(f"attention per document does not know {', '.join(unknown)} of {type(module).__name__}")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise UnsupportedError(f"attention per document is causal, that of {type(module).__name__} is not")
    window = _least(sliding_window, _window_of(attention_mask))
    if key.shape[2] != length:
        if length != 1:
            raise UnsupportedError("attention per document has no cache; set_attn_implementation('sdpa') to generate")
        seen = key.shape[2] if window is None else min(window, key.shape[2])
        form = _Form(scaling, 0.0, None, softcap, s_aux)
        return _one_document(query, key[:, :, -seen:], value[:, :, -seen:], form).contiguous(), None
    starts = [0, length] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    if starts[0] != 0 or starts[-1] != length or (cu_seq_lens_q is not None and rows != 1):
        raise UnsupportedError(f"document starts {starts} do not fit {rows} row(s) of {length} tokens")
    lengths = [end - start for start, end in pairwise(starts)]
    form = _Form(scaling, dropout, window, softcap, s_aux)
    # Not slices: the gradient of a slice is as large as the whole row, that of a split is joined once.
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [_one_document(q, k, v, form) for q, k, v in parts]
    return (outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


def window_mask(
    *_: Any,
    q_length: int = 0,
    kv_length: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool | None = None,
    **__: Any,
) -> Tensor | None:
    """The mask transformers would build: none, or if a window hides tokens an empty tensor [1, 1, 0, window].

    Raises UnsupportedError for masks that are neither causal nor windows, and for padding.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedError(
            "attention per document takes no padding; pack documents instead (odc.experiments.data.packing)"
        )
    if use_vmap or allow_is_bidirectional_skip is not None:
        raise UnsupportedError("attention per document is causal, the model's mask is not")
    if local_size is None or local_size >= kv_length:
        return None
    if getattr(config, "attention_chunk_size", None) == local_size:
        raise UnsupportedError(f"attention per document has no chunks, the model attends in chunks of {local_size}")
    return torch.empty(1, 1, 0, local_size, dtype=torch.bool)


def _window_of(mask: Tensor | None) -> int | None:
    if mask is None:
        return None
    if mask.ndim != 4 or mask.shape[2] != 0:
        raise UnsupportedError("attention per document takes no attention mask; pack documents without padding")
    return mask.shape[3] or None  # a wholly empty one is how `odc.split` has none built


def _least(*windows: int | None) -> int | None:
    return min((window for window in windows if window is not None), default=None)


def _one_document(query: Tensor, key: Tensor, value: Tensor, form: _Form) -> Tensor:
    """[B, tokens, heads, width]; the last query sees all keys up to the last one."""
    length, seen = query.shape[2], key.shape[2]
    narrow = form.window is not None and form.window < seen
    if not narrow and form.softcap is None and form.sinks is None:
        return _fused(query, key, value, form, is_causal=length == seen).transpose(1, 2)
    # Of windows about half of the scores of a block are used: a block has no more queries than its first one has keys.
    most = max(form.window, _LEAST_ROWS) if narrow and form.window is not None else length
    keys_at_once = 2 * most if narrow else seen
    rows = max(1, min(length, most, _BLOCK_SCORES // (query.shape[0] * query.shape[1] * keys_at_once)))
    outputs = []
    for number, part in enumerate(query.split(rows, dim=2)):
        end = seen - length + number * rows + part.shape[2]  # of the keys that the part's last query sees
        first = 0 if not narrow or form.window is None else max(0, end - part.shape[2] + 1 - form.window)
        keys = (key[:, :, first:end], value[:, :, first:end])
        if form.softcap is None and form.sinks is None:
            outputs.append(_fused(part, *keys, form, attn_mask=_visible(part, keys[0], form.window)))
        else:  # scores are not kept for backward
            scored: Tensor = checkpoint(_scored, part, *keys, form, use_reentrant=False)
            outputs.append(scored)
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Bool [queries, keys]: which keys a query sees. The last of both stand at one position."""
    place = torch.arange(key.shape[2], device=key.device)
    own = place[-query.shape[2] :, None]
    visible = place <= own
    return visible if window is None else visible & (place > own - window)


def _fused(query: Tensor, key: Tensor, value: Tensor, form: _Form, **mask: Any) -> Tensor:
    """SDPA of torch, with one of its two ways to mask."""
    grouped = key.shape[1] != query.shape[1]
    return scaled_dot_product_attention(
        query, key, value, dropout_p=form.dropout, scale=form.scale, enable_gqa=grouped, **mask
    )


def _scored(query: Tensor, key: Tensor, value: Tensor, form: _Form) -> Tensor:
    """Attention with all scores laid out, at least in fp32."""
    scale = query.shape[-1] ** -0.5 if form.scale is None else form.scale
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = (query.unflatten(1, (key.shape[1], -1)) @ key[:, :, None].mT).to(exact).flatten(1, 2) * scale
    if form.softcap is not None:
        scores = (scores / form.softcap).tanh() * form.softcap
    scores = scores.masked_fill(~_visible(query, key, form.window), -torch.inf)
    if form.sinks is not None:
        sinks = form.sinks.to(exact)[None, :, None, None].expand(*scores.shape[:3], 1)
        chances = torch.cat([scores, sinks], dim=3).softmax(3)[..., :-1]
    else:
        chances = scores.softmax(3)
    chances = drop(chances, form.dropout).to(value.dtype).unflatten(1, (value.shape[1], -1))
    output: Tensor = (chances @ value[:, :, None]).flatten(1, 2)
    return output
