"""Exact causal attention of a piece's queries over the whole sample, from blocks merged by their log-sum-exp."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from odc.errors import UnsupportedError
from odc.split import _torch_private
from odc.split.cut import Block, Sees
from odc.split.handle import PieceHandle

_ROWS = 1024  # queries at a time where scores are laid out in full
Parts = dict[int, Tensor]  # by place: keys and values [2, heads, tokens, width]


@_torch_private.without_dynamo
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    piece: PieceHandle,
    layer: int,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention of this piece's tokens to all earlier tokens of the sample; waits for the peers' keys.

    Args:
        query: [1, heads, tokens of the piece, width], with its positions in the sample applied.
        key, value: [1, key heads, tokens of the piece, width]; as many heads as the query's, or a divisor.
        piece: the `odc_piece` that the model was called with.
        layer: number of the attention layer, from 0; every layer is called once, in the same order on all ranks.
        scale: of the scores; 1 / sqrt(width) unless given.
        window: tokens that a token sees, itself included; all earlier ones unless given.

    Returns [1, heads, tokens of the piece, width].

    Raises:
        UnsupportedError: keys and values differ in shape, dtype or device, or another model runs the piece than the
            one that the Splitter was made with.
        PeerLostError, WaitTimeoutError: of a rank that holds another piece.
    """
    if not piece.vouched:
        raise UnsupportedError(
            f"layer {layer} attends for a piece of a split sample, but the model that the Splitter was made with was "
            "not called, so that nothing vouches for the piece's position_ids: call that model"
        )
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    same = key.shape == value.shape and query.dtype == key.dtype == value.dtype and query.device == key.device
    if not same or query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1]:
        raise UnsupportedError(
            f"a split sample needs keys and values of one shape, and one dtype: layer {layer} has queries "
            f"{list(query.shape)} {query.dtype}, keys {list(key.shape)} {key.dtype} and values {list(value.shape)} "
            f"{value.dtype}"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return piece.attend(query, key, value, layer, scale, window)


class Merged(NamedTuple):
    """Attention over several blocks.

    Args:
        out: [1, heads, tokens, width], in the queries' dtype.
        lse: log-sum-exp of all scores of a query, at least fp32 [1, heads, tokens].
        rests: of each block, what its backward needs besides.
    """

    out: Tensor
    lse: Tensor
    rests: list[tuple[Any, ...]]


def attend_blocks(query: Tensor, parts: Parts, blocks: list[Block], scale: float) -> Merged:
    """Attention of [1, heads, tokens, width] queries to keys that are taken from `parts` block by block.

    `blocks` as `Cut.blocks` orders them: causal ones first, in which every query occurs once.
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    _, heads, tokens, width = query.shape
    out = query.new_empty((1, tokens, heads, width), dtype=exact).transpose(1, 2)  # as models lay it out next
    lse = query.new_empty((1, heads, tokens), dtype=exact)
    rests = []
    for rows, owner, keys, sees in blocks:
        q, kv = query[:, :, rows], parts[owner][:, :, keys]
        if sees is Sees.LATER:
            q, kv = q.flip(2), kv.flip(2)
        part, weight, rest = _forward(q, kv[:1], kv[1:], sees is not Sees.ALL, scale)
        if sees is Sees.LATER:
            part, weight = part.flip(2), weight.flip(2)
        rests.append(rest)
        if sees is Sees.EARLIER:
            out[:, :, rows], lse[:, :, rows] = part, weight
        else:
            before = lse[:, :, rows]
            out[:, :, rows].lerp_(part.to(exact), (weight - before).sigmoid_()[..., None])
            torch.logaddexp(before, weight, out=before)
    return Merged(out.to(query.dtype), lse, rests)


def attend_blocks_backward(
    grad: Tensor, query: Tensor, parts: Parts, blocks: list[Block], merged: Merged, scale: float, dq: Tensor
) -> Parts:
    """Gradients of the keys and values in these blocks, by place, at least fp32; the queries' are added to `dq`.

    `merged.rests` are of these blocks, `merged.out` and `merged.lse` of attention to all.
    """
    exact = merged.lse.dtype
    dkv = {owner: torch.zeros_like(parts[owner], dtype=exact) for owner in {block.owner for block in blocks}}
    for (rows, owner, keys, sees), rest in zip(blocks, merged.rests, strict=True):
        mine = [tensor[:, :, rows] for tensor in (grad, query, merged.out, merged.lse)]
        kv = parts[owner][:, :, keys]
        if sees is Sees.LATER:
            mine, kv = [tensor.flip(2) for tensor in mine], kv.flip(2)
        g, q, out, lse = mine
        found = _backward(g, q, kv[:1], kv[1:], out, lse.contiguous(), rest, sees is not Sees.ALL, scale)
        if sees is Sees.LATER:
            found = (found[0].flip(2), found[1].flip(2), found[2].flip(2))
        dq[:, :, rows] += found[0]
        dkv[owner][:1, :, keys] += found[1]
        dkv[owner][1:, :, keys] += found[2]
    return dkv


def _forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> _torch_private.Block:
    if _torch_private.has_flash(query):
        return _torch_private.flash(query, key, value, causal, scale)
    outs, weights = [], []
    with torch.autocast(query.device.type, enabled=False):  # it would round the scores to half precision
        for first in range(0, query.shape[2], _ROWS):
            scores = _scores(query[:, :, first : first + _ROWS], key, causal, first, scale)
            weights.append(scores.logsumexp(-1))
            weighted = (scores - weights[-1][..., None]).exp() @ value.to(scores.dtype)[:, :, None]
            outs.append(weighted.flatten(1, 2))
    lse = torch.cat([weight.flatten(1, 2) for weight in weights], 2)
    return torch.cat(outs, 2).to(query.dtype), lse, ()


def _backward(
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
    if _torch_private.has_flash(query):
        return _torch_private.flash_backward(grad, query, key, value, out, lse, rest, causal, scale)
    groups, exact = key.shape[1], lse.dtype
    dqs, dk, dv = [], torch.zeros_like(key, dtype=exact), torch.zeros_like(value, dtype=exact)
    with torch.autocast(query.device.type, enabled=False):
        for first in range(0, query.shape[2], _ROWS):
            rows = slice(first, first + _ROWS)
            g, q, o, weight = (t[:, :, rows].to(exact).unflatten(1, (groups, -1)) for t in (grad, query, out, lse))
            chance = (_scores(query[:, :, rows], key, causal, first, scale) - weight[..., None]).exp()
            dv += (chance.mT @ g).sum(2)
            dscores = chance * (g @ value.to(exact)[:, :, None].mT - (g * o).sum(-1, keepdim=True)) * scale
            dk += (dscores.mT @ q).sum(2)
            dqs.append((dscores @ key.to(exact)[:, :, None]).flatten(1, 2))
    return torch.cat(dqs, 2), dk, dv


def _scores(query: Tensor, key: Tensor, causal: bool, first: int, scale: float) -> Tensor:
    """[1, key heads, queries of a key head, rows, keys], at least fp32; the first row is query `first`."""
    exact = torch.promote_types(query.dtype, torch.float32)
    scores: Tensor = query.to(exact).unflatten(1, (key.shape[1], -1)) @ key.to(exact)[:, :, None].mT * scale
    if causal:
        row = torch.arange(first, first + query.shape[2], device=query.device)[:, None]
        scores = scores.masked_fill(torch.arange(key.shape[2], device=query.device) > row, -torch.inf)
    return scores
