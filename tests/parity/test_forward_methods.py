"""Forward methods besides `forward`, and forwards inside each other: each program runs under both, and everything it
returns is equal.

Two ranks, one backward a minibatch unless noted otherwise, so equal means to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.models import (
    Tiny,
    clip,
    own_gradients,
    own_parameters,
    tokens,
)
from support.programs import Compared, Make, Programs, Result, new
from support.ranks import Pools
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from odc import fully_shard

PROGRAMS = Programs()


@PROGRAMS.add
def another_forward_method(shard_with: Make, rank: int, world: int) -> Result:
    model, optimizer = new(shard_with)
    register_fsdp_forward_method(model, "hidden")
    seen: Result = {}
    for number in range(2):
        x = tokens(rank, number, 0)
        hidden = model.hidden(x)
        hidden.square().mean().backward()
        seen[f"hidden{number}"] = hidden.detach()
        clip(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {**seen, **own_parameters(model)}


def _hidden(self: Tiny, x: torch.Tensor) -> torch.Tensor:
    h = self.embed(x)
    for layer in self.layers:
        h = layer(h)
    return h


Tiny.hidden = _hidden  # type: ignore[attr-defined]


class Nesting(nn.Module):
    """Its forward and its method `scored` run part of it, then the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.interrupted = False

    def forward(self, x: torch.Tensor, nested: bool = False) -> torch.Tensor:
        if nested:
            return self(self.norm(self.before(x)).tanh())
        x = self.layers[0](x).tanh()
        if self.interrupted:
            self.interrupted = False
            raise ValueError("interrupted")
        return self.head(self.norm(self.layers[1](x).tanh()))  # type: ignore[no-any-return]

    def scored(self, x: torch.Tensor) -> torch.Tensor:
        return self(self.norm(self.before(x)).tanh()).square().sum()  # type: ignore[no-any-return]


def nesting(shard_with: Make, rank: int, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> Result:
    """Gradients of two steps, each of which runs the model by `run(model, x)`."""
    torch.manual_seed(0)
    model: Any = Nesting()
    for part in (*model.layers, [model.norm, model.head], model):
        shard_with(part, mesh=init_device_mesh("cpu", (2,)))
    register_fsdp_forward_method(model, "scored")
    seen: Result = {}
    for number in range(2):
        run(model, torch.linspace(-1, 1, 8).view(2, 4) + rank).backward()
        seen |= {f"{number} {name}": one for name, one in own_gradients(model).items()}
        model.zero_grad()
    return seen


# Before, torch has a unit reduced in the middle of the backward if it is called inside its own forward.
torch_can = "entering_forward_pass" in FSDPParamGroup.pre_forward.__code__.co_varnames
nested_if_torch_can: Callable[[Any], Any] = PROGRAMS.add if torch_can else lambda program: program


@nested_if_torch_can
def a_forward_method_that_calls_the_model(shard_with: Make, rank: int, world: int) -> Result:
    """What was computed before the call, by the root and by part of a unit, keeps its gradient."""
    return nesting(shard_with, rank, lambda model, x: model.scored(x))


@nested_if_torch_can
def a_forward_that_calls_the_model(shard_with: Make, rank: int, world: int) -> Result:
    return nesting(shard_with, rank, lambda model, x: model(x, nested=True).square().sum())


@nested_if_torch_can
def a_forward_method_that_is_run_again_after_an_error(shard_with: Make, rank: int, world: int) -> Result:
    """Caught where the frames of the failed call are still alive. The reference never fails."""

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.interrupted = shard_with is fully_shard
        try:
            return model.scored(x)  # type: ignore[no-any-return]
        except ValueError:
            return model.scored(x)  # type: ignore[no-any-return]

    return nesting(shard_with, rank, run)


@nested_if_torch_can
def evaluation_by_a_forward_method(shard_with: Make, rank: int, world: int) -> Result:
    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model.scored(x)
            model(x, nested=True)
        return model.scored(x)  # type: ignore[no-any-return]

    return nesting(shard_with, rank, run)


@PROGRAMS.each()
def test_equals_torch_to_the_bit(ranks: Pools, program: Compared) -> None:
    ranks(2).run(program)
