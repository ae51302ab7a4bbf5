"""Split samples inside odc's minibatch: three optimizer steps over sharded parameters, against one process."""

from __future__ import annotations

import time
import uuid
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.split_jobs import LONGEST, Minibatch, losses_of, losses_whole, model_of

from odc import Settings, fully_shard
from odc.split import Splitter

CUTS = ["zigzag", "contiguous", "uneven"]


def three_steps(
    rank: int, world: int, name: str, dtype: str, checkpoint: bool, keep: bool, compiled: bool, kind: str = "llama"
) -> list[str]:
    """Overlapping gangs, then 3, 2 and 1 whole samples on rank 1 and none on the others."""
    model: Any = model_of(kind, getattr(torch, dtype), checkpoint=checkpoint)
    plain = model_of(kind, getattr(torch, dtype))
    layers = model.transformer.h if kind == "gpt2" else model.model.layers
    if compiled:
        for layer in layers:
            layer.compile(backend="eager")
    settings = Settings(timeout_s=120.0, reproducible=dtype == "float64")  # else gradients are summed in fp32
    for unit in [*layers, model]:
        fully_shard(unit, settings=settings)
    splitter = Splitter(model, LONGEST, piece_tokens=100, keep=keep, timeout_s=120.0, name=name)
    found, limit = list[str](), 1e-12 if dtype == "float64" else 1e-5
    # With less eps, gradients that are zero but for rounding, as of a key's bias, would become steps.
    mine, its = (torch.optim.AdamW(one.parameters(), 0.003, eps=1e-4) for one in (model, plain))
    for step in range(3):
        splits = [(90 + step, [0, 1], CUTS[step]), (64, [world - 1, 0], CUTS[step - 1])]
        minibatch = Minibatch(splits, [(9, 1), (30, 1), (17, 1)][step:])
        total = sum(minibatch.lengths)
        time.sleep(0.05 * ((rank + step) % world))
        with model.minibatch():
            for loss in losses_of(model, splitter, minibatch, rank, world):
                (loss * world / total).backward()
        for loss in losses_whole(plain, minibatch, range(len(minibatch.lengths))):
            (loss * world / total).backward()  # rounded alike: these models' norms are in fp32 inside
        for parameter in plain.parameters():
            parameter.grad.div_(world)  # type: ignore[union-attr]
        grads = [(one.grad.full_tensor(), other.grad) for one, other in zip(model.parameters(), plain.parameters())]  # type: ignore[union-attr] # noqa: B905
        worst = max(float((a - b).norm() / b.norm()) for a, b in grads)
        mine.step()
        its.step()
        mine.zero_grad()
        its.zero_grad()
        weights = zip(model.parameters(), plain.parameters(), strict=True)
        after = max(float((a.full_tensor() - b).detach().norm() / b.detach().norm()) for a, b in weights)  # type: ignore[attr-defined]
        what = f"{kind} {dtype} {world} ranks {checkpoint=} {keep=} {compiled=}"
        what += f" step {step}: {worst:.1e}, weights {after:.1e}"
        found.append(what)
        assert worst <= limit and after <= limit, what
    dist.barrier()
    splitter.close()
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("checkpoint", "keep"), [(False, True), (True, True), (True, False)])
def test_three_steps_of_adamw(ranks: Any, world: int, dtype: str, checkpoint: bool, keep: bool) -> None:
    print(*ranks(world).run(three_steps, uuid.uuid4().hex, dtype, checkpoint, keep, False)[0], sep="\n")


# Quick compares the gradients of every kind (test_exact), and three steps of one.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "world"), [("llama", 4), ("qwen2", 2), ("qwen3", 3), ("mistral", 4), ("gpt2", 2), ("mixtral", 3)]
)
@pytest.mark.parametrize(("checkpoint", "keep"), [(False, True), (True, False)])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_three_steps_of_every_kind(ranks: Any, kind: str, world: int, dtype: str, checkpoint: bool, keep: bool) -> None:
    print(*ranks(world).run(three_steps, uuid.uuid4().hex, dtype, checkpoint, keep, False, kind)[0], sep="\n")


@pytest.mark.thorough
def test_compiled_block_by_block(ranks: Any) -> None:
    print(*ranks(2).run(three_steps, uuid.uuid4().hex, "float64", False, True, True)[0], sep="\n")
