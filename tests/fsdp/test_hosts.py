"""Ranks on several hosts (network namespaces of this machine): what odc computes there is what FSDP2 computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from odc import Settings, fully_shard

HostPools = Callable[[int, int], Any]
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


def train(
    shard: Callable[..., Any], rank: int, world: int, counts: tuple[tuple[int, ...], ...], settings: Settings | None
) -> list[torch.Tensor]:
    """Whole parameters after every step, and the outputs of an evaluation between them."""
    model, mine = Exact(), shard is fully_shard
    options = {"settings": settings} if mine and settings is not None else {}
    for layer in model.layers:
        shard(layer, **options)
    shard(model, **options)
    optimizer = SignStep(model.parameters())
    found: list[torch.Tensor] = []
    for step, row in enumerate(counts):
        if mine:
            with model.minibatch():
                for i in range(row[rank]):
                    model(batch(rank, step, i)).sum().backward()
        else:
            most = max(row)
            for i in range(most):
                model.set_requires_gradient_sync(i == most - 1)
                (model(batch(rank, step, i)).sum() * float(i < row[rank])).backward()
        found += [p.grad.full_tensor() if p.grad is not None else torch.zeros(1) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(model(batch(rank, step, 99)))
    return found + [values.full_tensor() for values in model.state_dict().values()]


def same(rank: int, world: int, counts: tuple[tuple[int, ...], ...], settings: Settings | None) -> int:
    ours = train(fully_shard, rank, world, counts, settings)
    theirs = train(torch_fully_shard, rank, world, counts, None)
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, other), (
            f"rank {rank}: value {number} differs: {one.flatten()[:4]} {other.flatten()[:4]}"
        )
    return len(ours)


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2)])
def test_equal_to_fsdp2(host_ranks: HostPools, hosts: int, per_host: int) -> None:
    counts = ((1,) * 4, (2, 1, 3, 1), (0, 2, 0, 1))
    host_ranks(hosts, per_host).run(same, counts, Settings(timeout_s=20.0))
