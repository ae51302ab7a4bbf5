"""A move that autograd knows: its backward is the inverse move of the gradients, over the same exchange.

One autograd function covers all fields of a move. Every rank must run its backward: one that got no rows calls backward
on its empty result all the same, or it misses the gradients of rows that it sent, and with collectives its peers wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from odc.dispatch.exchange.rows import Exchange
from odc.dispatch.route import Route

BACK = ".back"


def move(
    exchange: Exchange, step: int, channel: str, route: Route, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`Exchange.move` whose results carry gradients back to where the rows came from.

    Floating-point results require gradients on every rank, also where the tensor given does not (an empty one on a rank
    that encoded nothing). Backward moves gradients under `channel` + ".back"; fields whose result was not used get
    zeros. Args, waits and errors as `Exchange.move`.
    """
    names = list(tensors)
    given = [
        tensor if tensor.requires_grad or not _differentiable(tensor) else tensor.detach().requires_grad_()
        for tensor in tensors.values()
    ]
    moved = _Move.apply(exchange, step, channel, route, names, *given)  # type: ignore[no-untyped-call]
    return dict(zip(names, moved, strict=True))


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: Exchange,
        step: int,
        channel: str,
        route: Route,
        names: list[str],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.step, ctx.channel, ctx.route, ctx.names = exchange, step, channel, route, names
        ctx.moving = [_differentiable(tensor) for tensor in tensors]
        got = exchange.move(step, channel, route, dict(zip(names, tensors, strict=True)))
        results = tuple(got[name] for name in names)
        ctx.mark_non_differentiable(*(one for one, moves in zip(results, ctx.moving, strict=True) if not moves))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        moving = {name: grad for name, grad, moves in zip(ctx.names, gradients, ctx.moving, strict=True) if moves}
        back = ctx.route.inverse.of_fields(list(moving))
        got = ctx.exchange.move(ctx.step, ctx.channel + BACK, back, moving)
        return (None, None, None, None, None, *(got.get(name) for name in ctx.names))
