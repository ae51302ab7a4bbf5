"""Under `odc.fully_shard` with `reproducible=True` and one example per forward: bit for bit, whatever the policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.doubles import exchange_of
from support.toy import ENCODERS, Toy, draw, phases, step_as_drawn, step_rearranged

import odc
from odc.dispatch import Nodes
from odc.dispatch.orchestrator import Orchestrator, channels


def sharded_toy() -> Toy:
    model = Toy()
    for unit in (model.vision, model.audio, model.llm):
        odc.fully_shard(unit)
    return odc.fully_shard(model, settings=odc.Settings(reproducible=True, timeout_s=60.0))


def gradients(model: Toy, world: int) -> list[torch.Tensor]:
    found = [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def nothing() -> None:
    """Gradients are pushed as they come."""


def bitwise(rank: int, world: int, kind: str, policies: list[str], seed: int) -> None:
    model, batch = sharded_toy(), draw(rank, seed)
    with model.minibatch():
        drawn = step_as_drawn(model, batch, True, nothing)
    expected = gradients(model, world)
    assert len(expected) == len(list(model.parameters())), f"{len(expected)} gradients on rank {rank}"
    for name in policies:
        with exchange_of(kind, rank, world, channels(ENCODERS)) as exchange:
            orchestrator = Orchestrator(*phases(name), exchange, nodes=Nodes(2))
            plan = orchestrator.plan(batch.records)
            with model.minibatch():
                losses = step_rearranged(model, orchestrator, plan, batch, True, nothing)
            found = gradients(model, world)
            assert len(losses) == len(plan.lengths) and len(drawn) == len(batch.examples)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other), f"{name}, rank {rank}: off by {(one - other).abs().max()}"


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["collective", "on_demand"])
def test_sharded_gradients_are_the_same_bits(ranks: Any, kind: str, world: int) -> None:
    def has_all(seed: int) -> bool:
        return all(any(len(draw(rank, seed).rows(name)) for rank in range(world)) for name in ENCODERS)

    ranks(world).run(bitwise, kind, ["llm only", "full"], next(seed for seed in range(100) if has_all(seed)))
