"""What takes the place of a piece in the check on first use: the whole sample, or one piece with recorded keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from odc.errors import UnsupportedError
from odc.split.attention import Merged, attend_blocks, attend_blocks_backward
from odc.split.cut import Block, Cut


class Stage:
    """One run of the model over the tokens of some places of a sample; records what its layers hand over.

    Attributes:
        open: the forward is running. Afterwards a layer that attends is being recomputed.
        row_bytes: by layer, of keys and values of one token.
        windows: by layer, as it was handed over.
        dtypes: of all queries.
        queries: by layer [1, heads, tokens, width].
        kv: by layer, keys and values [2, key heads, tokens, width].
    """

    def __init__(self, cut: Cut, device: torch.device) -> None:
        self.cut, self.open = cut, True
        self.at = [cut.positions(place, device) for place in range(len(cut.slices))]
        self.row_bytes: dict[int, int] = {}
        self.windows: dict[int, int | None] = {}
        self.dtypes: set[torch.dtype] = set()
        self.queries: dict[int, Tensor] = {}
        self.kv: dict[int, Tensor] = {}

    @property
    def positions(self) -> Tensor:
        """Of this run's tokens in the sample [tokens]."""
        raise NotImplementedError

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int | None) -> Tensor:
        """See `odc.split.attend`."""
        expected = len(self.positions)
        if query.shape[0] != 1 or query.shape[2] != expected or key.shape[2] != expected:
            raise UnsupportedError(
                f"layer {layer} attends with queries {list(query.shape)} and keys {list(key.shape)} where one row of "
                f"{expected} tokens was given: no cache, padding or packing goes with a split sample"
            )
        kv = torch.cat([key, value])
        if self.open:
            if layer in self.row_bytes:
                raise UnsupportedError(
                    f"samples of this model cannot be split: layer {layer} attends more than once in a forward, but "
                    "its keys and values are exchanged once (a looped layer, or an attention of several parts)"
                )
            self.row_bytes[layer], self.windows[layer] = 2 * key.shape[1] * key.shape[3] * key.itemsize, window
            self.dtypes.add(query.dtype)
            self.queries[layer], self.kv[layer] = query, kv
        return self._attend(query, kv, layer, scale, window)

    def _attend(self, query: Tensor, kv: Tensor, layer: int, scale: float, window: int | None) -> Tensor:
        raise NotImplementedError


class WholeStage(Stage):
    """The whole sample in one row, whose attention is computed piece by piece.

    Attributes:
        lent: by layer, place and owner, the keys and values of that owner which the place attends to; a tensor of its
            own each, so that its gradient is what the place would send to the owner.
    """

    def __init__(self, cut: Cut, device: torch.device) -> None:
        super().__init__(cut, device)
        self.lent: dict[int, list[list[Tensor]]] = {}
        self._back = torch.cat(self.at).argsort()

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.cut.length, device=self._back.device)

    def _attend(self, query: Tensor, kv: Tensor, layer: int, scale: float, window: int | None) -> Tensor:
        outs, lent = [], []
        for place, rows in enumerate(self.at):
            parts = [kv[:, :, keys] for keys in self.at]
            lent.append(parts)
            outs.append(_StagedAttention.apply(query[:, :, rows], self.cut.blocks(place, window), scale, *parts))  # type: ignore[no-untyped-call]
        if self.open:
            self.lent[layer] = lent
        return torch.cat(outs, 2)[:, :, self._back]


class PieceStage(Stage):
    """One piece by itself; the keys and values of the others are those of the whole sample.

    Args:
        whole: that has run.
        place: of the piece.
        alone: the piece sees only its own tokens, as if nothing was exchanged.
    """

    def __init__(self, whole: WholeStage, place: int, *, alone: bool = False) -> None:
        super().__init__(whole.cut, whole.positions.device)
        self._whole, self.place, self._alone = whole, place, alone

    @property
    def positions(self) -> Tensor:
        return self.at[self.place]

    def _attend(self, query: Tensor, kv: Tensor, layer: int, scale: float, window: int | None) -> Tensor:
        if layer not in self._whole.kv:
            raise UnsupportedError(f"layer {layer} attends in a piece, but not in a whole sample")
        others = self._whole.kv[layer].detach()
        parts = [kv if owner == self.place else others[:, :, keys] for owner, keys in enumerate(self.at)]
        blocks = self.cut.blocks(self.place, window)
        if self._alone:
            blocks = [block for block in blocks if block.owner == self.place]
        out: Tensor = _StagedAttention.apply(query, blocks, scale, *parts)  # type: ignore[no-untyped-call]
        return out


class _StagedAttention(torch.autograd.Function):
    """Attention of some queries to the keys and values of all places, by the blocks of a piece."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, blocks: list[Block], scale: float, *parts: Tensor) -> Tensor:
        merged = attend_blocks(query, dict(enumerate(parts)), blocks, scale)
        ctx.how = blocks, scale, merged.rests
        ctx.save_for_backward(query, merged.out, merged.lse, *parts)
        return merged.out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        blocks, scale, rests = ctx.how
        query, out, lse, *parts = ctx.saved_tensors
        dq = torch.zeros_like(query, dtype=lse.dtype)
        by_place = dict(enumerate(parts))
        found = attend_blocks_backward(grad, query, by_place, blocks, Merged(out, lse, rests), scale, dq)
        own = [found[place].to(part.dtype) if place in found else None for place, part in by_place.items()]
        return dq.to(query.dtype), None, None, *own
