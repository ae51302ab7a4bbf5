"""Rearranging changes nothing: losses and gradients against the same step as it was drawn, on real ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.doubles import exchange_of
from support.on_ranks import on_ranks
from support.toy import ENCODERS, POLICIES, Batch, Toy, draw, phases, step_as_drawn, step_rearranged

import odc
from odc.dispatch import Nodes, Rearrangement
from odc.dispatch.exchange import BACK
from odc.dispatch.orchestrator import Orchestrator, channels
from odc.dispatch.route import Route
from odc.errors import AbandonedMinibatchError


def summed(model: Toy) -> tuple[Any, dict[str, torch.Tensor]]:
    """What to call after every backward: gradients are added up in fp64, so that their order does not show."""
    totals = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}

    def into() -> None:
        for name, p in model.named_parameters():
            if p.grad is not None:
                totals[name] += p.grad
                p.grad = None

    return into, totals


def over_ranks(losses: list[float], totals: dict[str, torch.Tensor]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """All losses in rising order, and all gradients as fp32."""
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, losses)
    for total in totals.values():
        dist.all_reduce(total)
    return sorted(loss for some in everyone for loss in some), {name: t.float() for name, t in totals.items()}


def compare(rank: int, world: int, kind: str, policies: list[str], seeds: list[int], each: bool) -> None:
    for name in policies:
        with exchange_of(kind, rank, world, channels(ENCODERS)) as exchange:
            orchestrator = Orchestrator(
                *phases(name), exchange, nodes=Nodes(2, tolerance=0.1) if name == "full" else None
            )
            for seed in seeds:
                model, batch = Toy(), draw(rank, seed)
                into, totals = summed(model)
                drawn, expected = over_ranks(step_as_drawn(model, batch, each, into), totals)
                into, totals = summed(model)
                plan = orchestrator.plan(batch.records)
                losses = step_rearranged(model, orchestrator, plan, batch, each, into)
                found, gradients = over_ranks(losses, totals)
                check(found, drawn, gradients, expected, each, f"{name}, seed {seed}, rank {rank}")


def check(
    losses: list[float],
    drawn: list[float],
    gradients: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    each: bool,
    where: str,
) -> None:
    assert len(losses) == len(drawn), f"{len(losses)} losses, {len(drawn)} examples: {where}"
    if each:
        assert losses == drawn, f"losses differ: {where}"
    for name, gradient in gradients.items():
        if each:
            same = torch.equal(gradient, expected[name])
        else:
            same = torch.allclose(gradient, expected[name], rtol=2e-5, atol=2e-5)
        assert same, f"gradient of {name} is off by {(gradient - expected[name]).abs().max()}: {where}"
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(drawn), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["collective", "on_demand"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("each", [False, True], ids=["whole batches", "one example per forward"])
def test_every_policy_leaves_losses_and_gradients_as_they_were(ranks: Any, kind: str, world: int, each: bool) -> None:
    ranks(world).run(compare, kind, list(POLICIES), [0, 1, 2], each)


def test_the_data_have_what_is_hard() -> None:
    batches = [draw(rank, seed) for seed in range(3) for rank in range(4)]
    assert any(not batch.examples for batch in batches), "a rank without examples"
    assert any(len(rows) > 100 for batch in batches for parts in batch.examples for _, rows in parts), "a giant"
    lacking = [{name for name, _ in parts} for batch in batches for parts in batch.examples]
    assert any(not names & set(ENCODERS) for names in lacking)
    assert any("vision" in names and "audio" not in names for names in lacking)
    assert isinstance(batches[0], Batch)


@on_ranks(2)
def test_a_rank_that_gives_a_minibatch_up_makes_its_moves_with_zeros(rank: int, world: int) -> None:
    model: Any = torch.nn.Linear(2, 1, bias=False)
    odc.fully_shard(model)
    route = Route.of(Rearrangement.to([1, 1], [1, 0]), {"rows": [3, 3]}, rank)
    with exchange_of("on_demand", rank, world, ["data", f"data{BACK}"]) as exchange:

        def move(step: int, channel: str, by: Route, rows: torch.Tensor) -> torch.Tensor:
            return exchange.move(step, channel, by, {"rows": rows})["rows"]

        for step, given_up in ((1, True), (2, False)):
            lost = pytest.raises(AbandonedMinibatchError, match="rank 1.*unreadable")
            with lost if given_up else contextlib.nullcontext(), model.minibatch():
                fails = given_up and rank == 1
                if fails:
                    model.abandon_minibatch("unreadable")
                arrived = move(step, "data", route, torch.full((3, 2), 0.0 if fails else 1.0 + rank)).requires_grad_()
                if not fails:
                    model(arrived).sum().backward()
                gradient = torch.zeros_like(arrived) if arrived.grad is None else arrived.grad
                move(step, f"data{BACK}", route.inverse, gradient)
            gradient = model.weight.grad
            assert gradient is None if given_up else gradient.full_tensor().tolist() == [[4.5, 4.5]]
