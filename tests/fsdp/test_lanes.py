"""The drop-in where copies happen late (see `support.deferred`): fetches are followed, gradients outlive their push."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.deferred import LateCopies, late
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from odc import Settings, fully_shard
from odc.fsdp import root_of


def trained(rank: int, world: int, settings: Settings, compute: torch.dtype | None) -> list[torch.Tensor]:
    """Whole parameters after three steps; ranks have unequal numbers of microbatches, one of them none at first.

    Sums do not depend on which rank pushes first: a last bit of one step would be a last bit of bf16 in the next.
    """
    settings = dataclasses.replace(settings, reproducible=True)
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy, settings=settings)
    fully_shard(model, mp_policy=policy, settings=settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(100 * step + rank)
        with model.minibatch():
            for _ in range((rank + step) % 3):
                model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def both(rank: int, world: int, settings: Settings, compute: torch.dtype | None) -> int:
    expected = trained(rank, world, settings, compute)
    with late() as lanes:
        found = trained(rank, world, settings, compute)
    for number, (want, have) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(have, want), f"parameter {number}"
    (only,) = lanes
    return only.settled


@pytest.mark.parametrize("compute", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "settings",
    [Settings(), Settings(prefetch=0, push_overlap=False), Settings(accumulate="direct"), Settings(prefetch=2)],
    ids=["default", "no overlap", "direct", "two ahead"],
)
def test_training_is_the_same_however_late_copies_are(ranks, settings: Settings, compute: torch.dtype | None) -> None:
    assert all(settled > 6 for settled in ranks(2).run(both, settings, compute)), "the lanes were used"


def stepped(rank: int, world: int, lanes: list[LateCopies] | None) -> list[torch.Tensor]:
    """Whole parameters after three steps of SGD; with `lanes`, the model's, each step is late, in a lane of its own."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer, settings=Settings(reproducible=True))
    fully_shard(model, settings=Settings(reproducible=True))

    def step(gradients: list[torch.Tensor]) -> None:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.detach().to_local().sub_(0.1 * gradient)

    for number in range(3):
        torch.manual_seed(10 * number + rank)
        model(torch.randn(4, 8)).square().sum().backward()
        gradients = [parameter.grad.to_local().clone() for parameter in model.parameters()]
        model.zero_grad()
        if lanes is None:
            step(gradients)
            continue
        with lanes[0].lane("optimizer"):
            lanes[0].ask(lambda gradients=gradients: step(gradients))
            model.set_post_optim_event(lanes[0].mark())
    if lanes is not None:
        with lanes[0].lane("optimizer"):
            lanes[0].settle()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def steps_agree(rank: int, world: int) -> bool:
    expected = stepped(rank, world, None)
    with late() as lanes:
        found = stepped(rank, world, lanes)
    return all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_shards_are_published_after_the_optimizer_of_another_stream(ranks) -> None:
    """As torch's gathers, which wait for `set_post_optim_event`'s event."""
    assert all(ranks(2).run(steps_agree))


def apart(rank: int, world: int, skipped: str) -> bool:
    """Whether training goes elsewhere when one function does not wait for the device."""
    expected = trained(rank, world, Settings(), None)
    with late(frozenset({skipped})):
        found = trained(rank, world, Settings(), None)
    return not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("skipped", "needed"),
    [
        ("PublishedShards.publish", True),
        ("DeviceRoute.push", True),
        ("DeviceDrain.__call__", True),
        ("no function", False),
    ],
)
def test_every_wait_for_the_device_is_needed(ranks, skipped: str, needed: bool) -> None:
    assert any(ranks(2).run(apart, skipped)) == needed


def attached_at_the_entry(rank: int, world: int) -> tuple[list[bool], list[bool]]:
    """Whether each rank is attached inside `minibatch()` before anything was fetched: on the CPU, with late copies."""
    found = []
    for asynchronous in (False, True):
        with late() if asynchronous else nullcontext():
            model: Any = fully_shard(nn.Linear(8, 8))
            with model.minibatch():
                found.append([root_of(model).layout.heap.attached(member) for member in range(world)])
            root_of(model).shut_down()
    return found[0], found[1]


def test_on_a_device_peers_are_reached_when_a_minibatch_is_entered(ranks) -> None:
    """Not by the first fetch: ranks that run two roots in opposite order would wait for each other."""
    for rank, (host, device) in enumerate(ranks(2).run(attached_at_the_entry)):
        assert host == [rank == 0, rank == 1] and device == [True, True]
