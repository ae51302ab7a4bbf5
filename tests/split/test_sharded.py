"""Split samples inside odc's minibatch: three optimizer steps over sharded parameters, against one process."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.split_jobs import LONGEST, Minibatch, losses_of, losses_whole, model_of
from torch import nn

from odc import Settings, fully_shard
from odc.split import Splitter

CUTS = ["zigzag", "contiguous", "uneven"]


def whole(reference: nn.Module, minibatch: Minibatch, world: int) -> None:
    """Leaves the minibatch's gradients in `reference`, every sample in one piece."""
    reference.zero_grad()
    for loss in losses_whole(reference, minibatch, range(len(minibatch.lengths))):
        (loss * world / sum(minibatch.lengths)).backward()  # rounded alike: these models' norms are in fp32 inside
    for parameter in reference.parameters():
        parameter.grad.div_(world)  # type: ignore[union-attr]


def farthest(found: Iterable[Any], expected: Iterable[Any]) -> float:
    """The largest relative distance of a tensor from its expected one."""
    pairs = zip(found, expected, strict=True)
    return max(float((one.detach() - other.detach()).norm() / other.detach().norm()) for one, other in pairs)


def three_steps(
    rank: int, world: int, name: str, dtype: str, checkpoint: bool, keep: bool, compiled: bool, kind: str = "llama"
) -> None:
    """Overlapping gangs, then 3, 2 and 1 whole samples on rank 1 and none on the others.

    Gradients are compared with those of the same weights, and the weights with three steps taken apart. Both are
    computed in fp64: in fp32 their own rounding, where a key's gradient cancels, would be as large as
    the differences that are sought, and different on every kind of processor.
    """
    model: Any = model_of(kind, getattr(torch, dtype), checkpoint=checkpoint)
    here, plain = model_of(kind, torch.float64), model_of(kind, torch.float64)
    with torch.no_grad():
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            other.copy_(one)
    layers = model.transformer.h if kind == "gpt2" else model.model.layers
    if compiled:
        for layer in layers:
            layer.compile(backend="eager")
    settings = Settings(timeout_s=120.0, reproducible=dtype == "float64")  # else gradients are summed in fp32
    for unit in [*layers, model]:
        fully_shard(unit, settings=settings)
    splitter = Splitter(model, LONGEST, piece_tokens=100, keep=keep, timeout_s=120.0, name=name)
    limit = 1e-12 if dtype == "float64" else 1e-5
    # With less eps, gradients that are zero but for rounding, as of a key's bias, would become steps.
    mine, its = (torch.optim.AdamW(one.parameters(), 0.003, eps=1e-4) for one in (model, plain))
    for step in range(3):
        splits = [(90 + step, [0, 1], CUTS[step]), (64, [world - 1, 0], CUTS[step - 1])]
        minibatch = Minibatch(splits, [(9, 1), (30, 1), (17, 1)][step:])
        with torch.no_grad():
            for one, other in zip(model.parameters(), here.parameters(), strict=True):
                other.copy_(one.full_tensor())  # type: ignore[operator]
        time.sleep(0.05 * ((rank + step) % world))
        with model.minibatch():
            for loss in losses_of(model, splitter, minibatch, rank, world):
                (loss * world / sum(minibatch.lengths)).backward()
        whole(here, minibatch, world)
        whole(plain, minibatch, world)
        gradients = (one.grad.full_tensor() for one in model.parameters())
        worst = farthest(gradients, (one.grad for one in here.parameters()))
        mine.step()
        its.step()
        mine.zero_grad()
        after = farthest((one.full_tensor() for one in model.parameters()), plain.parameters())
        assert max(worst, after) <= limit, f"step {step}: {worst:.1e}, weights {after:.1e}"
    dist.barrier()
    splitter.close()


@pytest.mark.parametrize(
    ("world", "dtype", "checkpoint", "keep"),
    [(2, "float64", False, True), (3, "float32", True, True), (3, "float64", True, False)],
)
def test_three_steps_of_adamw(ranks: Any, name: str, world: int, dtype: str, checkpoint: bool, keep: bool) -> None:
    ranks(world).run(three_steps, name, dtype, checkpoint, keep, False)


# Quick compares the gradients of every kind (test_exact), and three steps of one.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "world"), [("llama", 4), ("qwen2", 2), ("qwen3", 3), ("mistral", 4), ("gpt2", 2), ("mixtral", 3)]
)
def test_three_steps_of_every_kind(ranks: Any, name: str, kind: str, world: int) -> None:
    ranks(world).run(three_steps, name, "float64", False, True, False, kind)


@pytest.mark.thorough
def test_compiled_block_by_block(ranks: Any, name: str) -> None:
    ranks(2).run(three_steps, name, "float64", False, True, True)
