"""A model whose training is exact in whatever order sums are taken, so that equality is to the bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

HIDDEN, LAYERS = 24, 3


class Exact(nn.Module):
    """Layers whose gradients are whole numbers, so that sums are exact in any order, and equality is to the bit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))
        self.unused = nn.Linear(3, 5)
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=draw))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).clamp(-4, 4)
        return x


class SignStep(torch.optim.Optimizer):
    """Keeps whole numbers whole."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local = parameter.to_local()
                    local.sub_(parameter.grad.to_local().sign()).clamp_(-2, 2)


def batch(rank: int, step: int, i: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * step + 100 * i + rank)
    return torch.randint(-2, 3, (4, HIDDEN), generator=draw).float()
