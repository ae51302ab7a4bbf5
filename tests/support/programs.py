"""Programs that run under FSDP2 and under odc, and return what must be equal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
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
Compared = Callable[[int, int], None]

PLAIN = Case(counts=((1, 1),))


class Programs(dict[str, Compared]):
    """Programs by name, as functions of `(rank, world)` that fail where odc differs from FSDP2, to the bit."""

    def add(self, program: Program) -> Compared:
        """As a decorator: run the program under both; everything it returns must be equal."""

        @functools.wraps(program)
        def same(rank: int, world: int) -> None:
            mine, reference = (program(shard_with, rank, world) for shard_with in (fully_shard, torch_fully_shard))
            assert reference, "the program returns nothing to compare"
            wrong = differences(mine, reference, None)
            assert not wrong, "\n".join(wrong[:20])

        self[program.__name__] = same
        return same

    def each(self) -> pytest.MarkDecorator:
        """Gives a test each program in turn as `program`, for a pool to run."""
        return pytest.mark.parametrize("program", [pytest.param(same, id=name) for name, same in self.items()])


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
