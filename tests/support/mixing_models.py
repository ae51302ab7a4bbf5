"""Models of one's own that are not the same in pieces, which their outputs in one batch do not show."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from odc.split import attend
from support.split_jobs import OwnModel


class MixingModel(OwnModel):
    """`OwnModel`, whose hidden states [rows, tokens, 16] pass `mix` after each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)

    def forward(self, input_ids: Tensor, position_ids: Tensor, odc_piece: Any = None) -> Tensor:
        hidden = self.embed(input_ids) + self.position(position_ids)
        for layer, project in enumerate(self.qkv):
            q, k, v = project(hidden).unflatten(-1, (6, 8)).transpose(1, 2).split(2, dim=1)
            if odc_piece is None:
                out = scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                out = attend(q, k, v, odc_piece, layer)
            hidden = self.mix(hidden + torch.tanh(out.transpose(1, 2).flatten(2)))
        return self.head(hidden)

    def mix(self, hidden: Tensor) -> Tensor:
        return hidden


class BatchNorm(MixingModel):
    """Statistics over all tokens of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def mix(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden.flatten(0, 1)).view_as(hidden)


class ExpertChoice(MixingModel):
    """Each expert takes the quarter of all tokens that fit it best."""

    def mix(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, 1)
        scores = self.router(flat).softmax(-1)
        chosen = scores.topk(len(flat) // 4, dim=0)
        out = flat
        for expert in range(4):
            rows = chosen.indices[:, expert]
            out = out.index_add(0, rows, (expert + 1) * chosen.values[:, expert, None] * torch.sin(flat[rows]))
        return out.view_as(hidden)


class MeanOverTokens(MixingModel):
    """The mean of all tokens that are there is taken from each."""

    def mix(self, hidden: Tensor) -> Tensor:
        return hidden - 0.5 * hidden.mean((0, 1))


class ZeroMix(MixingModel):
    """A shift by one token behind a gate that training opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(16))

    def mix(self, hidden: Tensor) -> Tensor:
        return hidden + self.gate * hidden.roll(1, dims=1)


class ZeroProjection(MixingModel):
    """A shift by one token through a matrix of many elements, all of them 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 8192, bias=False)
        nn.init.zeros_(self.out.weight)

    def mix(self, hidden: Tensor) -> Tensor:
        return hidden + self.out(hidden.roll(1, dims=1)).unflatten(-1, (16, -1)).sum(-1)


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor) -> Tensor:
        ctx.how = loss.dtype, loss.device
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=ctx.how[0], device=ctx.how[1])


class AuxLoss(MixingModel):
    """The balance of its router over all tokens counts as a loss, which backward adds."""

    def mix(self, hidden: Tensor) -> Tensor:
        chance = self.router(hidden.flatten(0, 1)).softmax(-1)
        taken = nn.functional.one_hot(chance.argmax(-1), 4).to(chance.dtype)
        return _AddLoss.apply(hidden, 0.5 * (taken.mean(0) * chance.mean(0)).sum())  # type: ignore[no-any-return]


class Looped(OwnModel):
    """Runs its layers twice, and calls them by the same numbers."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, odc_piece: Any = None) -> Tensor:
        hidden = self.embed(input_ids) + self.position(position_ids)
        for layer, project in [*enumerate(self.qkv), *enumerate(self.qkv)]:
            q, k, v = project(hidden).unflatten(-1, (6, 8)).transpose(1, 2).split(2, dim=1)
            if odc_piece is None:
                out = scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                out = attend(q, k, v, odc_piece, layer)
            hidden = hidden + torch.tanh(out.transpose(1, 2).flatten(2))
        return self.head(hidden)


class Drops(MixingModel):
    """Drops by a function, which is no module of dropout."""

    def mix(self, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(hidden, 0.1, self.training)
