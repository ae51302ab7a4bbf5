"""Programs that run under FSDP2 and under odc, and return what must be equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from odc import fully_shard
from support.compare import differences
from support.models import Case, adamw, build, clip, next_token_loss, tokens

Make = Callable[..., Any]
Result = dict[str, torch.Tensor | None]
Program = Callable[[Make, int, int], Result]

PLAIN = Case(counts=((1, 1),))


class Programs(dict[str, Program]):
    """Programs by name: functions of `(fully_shard, rank, world)`."""

    def add(self, program: Program) -> Program:
        """As a decorator."""
        self[program.__name__] = program
        return program

    def same(self, name: str, rank: int, world: int) -> None:
        """Run one under both; everything it returns must be equal, to the bit."""
        mine = self[name](fully_shard, rank, world)
        reference = self[name](torch_fully_shard, rank, world)
        assert reference, "the program returns nothing to compare"
        wrong = differences(mine, reference, None)
        assert not wrong, "\n".join(wrong[:20])


def new(shard_with: Make, case: Case = PLAIN, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = build(shard_with, case, init_device_mesh("cpu", (dist.get_world_size(),)), **options)
    return model, adamw(model)


def backward(model: Any, rank: int, step: int, microbatch: int = 0, **options: Any) -> torch.Tensor:
    x = tokens(rank, step, microbatch)
    loss = next_token_loss(model(x, **options), x) / 18
    loss.backward()
    return loss.detach()


def step(model: Any, optimizer: torch.optim.Optimizer, rank: int, number: int) -> torch.Tensor:
    loss = backward(model, rank, number)
    clip(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss
