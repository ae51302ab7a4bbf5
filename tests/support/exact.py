"""A model whose training is exact in whatever order sums are taken, so that equality is to the bit."""

from __future__ import annotations

import time
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


def await_sums_in_backward(model: Any) -> list[int]:
    """Have the first layer's backward wait until the last layer's sums have come from all other hosts, which they do
    while backward goes on where it is known to be the last. Returns the epochs in which they have.
    """
    from odc.fsdp import root_of

    waited = list[int]()

    def await_sums(grad: torch.Tensor) -> None:
        root = root_of(model)
        reader, epoch = root.member.reader, root.minibatch.epoch
        assert reader is not None
        (unit,) = (unit.index for unit in root.layout.units if unit.name == "layers.2")
        deadline = time.monotonic() + 100
        while {reader._read.get((partner, unit), (0, 0))[0] for partner in root.grid.partners} != {epoch}:
            assert time.monotonic() < deadline, f"rank {root.rank}: the sums do not come"
            time.sleep(0.002)
        waited.append(epoch)

    model.layers[0].register_forward_hook(lambda *call: call[2].register_hook(await_sums) and None)
    return waited
