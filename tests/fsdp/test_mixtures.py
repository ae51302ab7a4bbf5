"""Loops that mix what the other files test alone: two models, marks inside marks, graphs used twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_same, differences
from support.models import (
    Case,
    Run,
    adamw,
    build,
    next_token_loss,
    own_gradients,
    own_parameters,
    reduced_exactly,
    token_share,
    tokens,
    train,
)
from support.ranks import RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import odc
from odc import OdcError, Settings, fully_shard

Pools = Callable[[int], RankPool]
Shard = Callable[..., Any]

PLAIN = Case(counts=((1, 1),))
COUNTS = ((1, 3), (2, 0), (0, 2))


def new(shard: Shard, world: int, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = build(shard, PLAIN, init_device_mesh("cpu", (world,)), **options)
    return model, adamw(model)


def options_of(shard: Shard) -> dict[str, Any]:
    return {"settings": Settings(reproducible=True)} if shard is fully_shard else reduced_exactly(PLAIN)


# marks inside minibatch() ----------------------------------------------------------------------------------------


def marked_inside(rank: int, world: int, how: str) -> None:
    """A trainer that marks its microbatches, run inside `minibatch()`: the block decides, marks change nothing."""
    case = Case(counts=COUNTS)
    padded = Case(counts=COUNTS, idiom="gradient_sync")
    reference = train(torch_fully_shard, padded, rank, world, pad=True, **reduced_exactly(padded))
    model, optimizer = new(fully_shard, world, **options_of(fully_shard))
    run = Run()
    for step in range(case.steps):
        count, share, losses = case.of(step)[rank], token_share(case.of(step), world), list[float]()
        with model.minibatch():
            for i in range(count):
                if how == "gradient_sync":
                    model.set_requires_gradient_sync(i == count - 1)
                elif how == "last_backward":
                    model.set_is_last_backward(i == count - 1)
                x = tokens(rank, step, i)
                loss = next_token_loss(model(x), x) * share
                loss.backward()
                losses.append(loss.item())
        run.losses.append(losses)
        run.gradients.append(own_gradients(model))
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), case.norm).full_tensor()))  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
    run.parameters = own_parameters(model)
    assert_same(run, reference)


@pytest.mark.parametrize("how", ["unmarked", "gradient_sync", "last_backward"])
def test_marks_inside_a_minibatch_change_nothing(ranks: Pools, how: str) -> None:
    ranks(2).run(marked_inside, how)


def finished_inside(rank: int, world: int) -> str:
    model, _ = new(fully_shard, world, settings=Settings(timeout_s=60.0))
    try:
        with model.minibatch():
            if rank == 0:
                model.finish_minibatch()
    except OdcError as error:
        return str(error)
    return "nothing was raised"


def test_finish_inside_a_minibatch_is_refused_on_every_rank(ranks: Pools) -> None:
    for message in ranks(2).run(finished_inside):
        assert "rank 0" in message
        assert "finish_minibatch" in message


# graphs and forwards ---------------------------------------------------------------------------------------------


def backward_twice(shard: Shard, rank: int, world: int) -> dict[str, torch.Tensor | None]:
    model, _ = new(shard, world, **options_of(shard))
    x = tokens(rank, 0, 0)
    loss = next_token_loss(model(x), x) / 18
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    return own_gradients(model)


def forward_before_the_block(shard: Shard, rank: int, world: int) -> dict[str, torch.Tensor | None]:
    model, _ = new(shard, world, **options_of(shard))
    x = tokens(rank, 0, 0)
    loss = next_token_loss(model(x), x) / 18
    if shard is fully_shard:
        with model.minibatch():
            loss.backward()
    else:
        loss.backward()
    return own_gradients(model)


def inference_first(shard: Shard, rank: int, world: int) -> dict[str, torch.Tensor | None]:
    """Under FSDP2 the unsharded parameters would be inference tensors for good, and training fails: no_grad there."""
    model, optimizer = new(shard, world)
    x = tokens(rank, 0, 0)
    with torch.inference_mode() if shard is fully_shard else torch.no_grad():
        seen = model(x).clone()
    for step in range(2):
        x = tokens(rank, step, 0)
        (next_token_loss(model(x), x) / 18).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"seen": seen, **own_parameters(model)}


def gradients_of_inputs(shard: Shard, rank: int, world: int) -> dict[str, torch.Tensor | None]:
    """Only activations are asked for: no parameter gets a gradient, and the next minibatch is as if it had not been."""
    model, _ = new(shard, world)
    for layer in model.layers:
        layer.requires_grad_(False)
    model.layers[0].register_forward_pre_hook(lambda module, args: args[0].requires_grad_(True))
    x = tokens(rank, 0, 0)
    (next_token_loss(model(x), x) / 18).backward()
    return own_gradients(model)


def no_grad_inside(shard: Shard, rank: int, world: int) -> dict[str, torch.Tensor | None]:
    """A forward without gradients between the forward and backward of a microbatch (a baseline, a metric)."""
    model, optimizer = new(shard, world)
    seen: dict[str, torch.Tensor | None] = {}
    for step in range(2):
        x = tokens(rank, step, 0)
        loss = next_token_loss(model(x), x) / 18
        with torch.no_grad():
            seen[f"metric{step}"] = model(tokens(rank, step, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**seen, **own_parameters(model)}


MIXTURES: dict[str, Callable[[Shard, int, int], dict[str, torch.Tensor | None]]] = {
    function.__name__: function
    for function in (backward_twice, forward_before_the_block, inference_first, gradients_of_inputs, no_grad_inside)
}


def same(rank: int, world: int, name: str) -> None:
    mine, reference = (MIXTURES[name](shard, rank, world) for shard in (fully_shard, torch_fully_shard))
    wrong = differences(mine, reference, None)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixture(ranks: Pools, name: str) -> None:
    ranks(2).run(same, name)


# a teacher -------------------------------------------------------------------------------------------------------


def distil(rank: int, world: int, how: str) -> None:
    """A student learns from a frozen teacher, with unequal counts; the reference pads, as FSDP2 must."""

    def run(shard: Shard) -> dict[str, torch.Tensor]:
        student, optimizer = new(shard, world, **options_of(shard))
        teacher, _ = new(shard, world, **options_of(shard))
        teacher.requires_grad_(False)
        mine = shard is fully_shard
        if mine and how == "opened_once":
            with torch.no_grad():
                teacher(tokens(rank, 99, 0))  # from here on its epoch stays open: ranks may call it as they like
        for step in range(4):
            counts = COUNTS[step % 3]
            roots = [student, teacher] if how == "together" else [student]

            def microbatch(i: int, step: int = step, counts: tuple[int, ...] = counts) -> None:
                x = tokens(rank, step, i)
                with torch.no_grad():
                    wanted = teacher(x).softmax(-1)
                weight = world / sum(counts) if i < counts[rank] else 0.0
                (F.cross_entropy(student(x).flatten(0, 1), wanted.flatten(0, 1)) * weight).backward()

            if mine:
                with odc.minibatch(*roots):
                    for i in range(counts[rank]):
                        microbatch(i)
            else:
                for i in range(max(counts)):
                    student.set_requires_gradient_sync(i == max(counts) - 1)
                    microbatch(i)
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad is None for p in teacher.parameters()), "the teacher has gradients"
        return own_parameters(student)

    wrong = differences(run(fully_shard), run(torch_fully_shard), None)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("how", ["together", "opened_once"])
def test_a_frozen_teacher_with_unequal_counts(ranks: Pools, how: str) -> None:
    ranks(2).run(distil, how)


# one rank evaluates, the other trains ----------------------------------------------------------------------------


def only_one_evaluates(rank: int, world: int) -> None:
    """Harmless: the evaluation's epoch is the one the other rank trains in."""
    results = []
    for shard in (fully_shard, torch_fully_shard):
        model, optimizer = new(shard, world)
        for step in range(3):
            if shard is fully_shard and rank == step % 2:
                with torch.no_grad():
                    model(tokens(rank, step, 5))
            x = tokens(rank, step, 0)
            (next_token_loss(model(x), x) / 18).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(own_parameters(model))
    wrong = differences(results[0], results[1], None)
    assert not wrong, "\n".join(wrong)


def one_closes_what_the_other_trains_in(rank: int, world: int) -> str:
    """Rank 0 evaluates and publishes, rank 1 trains: their epochs part, and both must be told."""
    model, _ = new(fully_shard, world, settings=Settings(timeout_s=10.0))
    x = tokens(rank, 0, 0)
    try:
        if rank == 0:
            with torch.no_grad():
                model(x)
            model.publish()
        for _ in range(2):
            next_token_loss(model(x), x).backward()
    except OdcError as error:
        return str(error)
    return "nothing was raised"


def test_only_one_rank_evaluates(ranks: Pools) -> None:
    ranks(2).run(only_one_evaluates)


def test_epochs_that_part_are_refused(ranks: Pools) -> None:
    messages = ranks(2).run(one_closes_what_the_other_trains_in)
    assert "rank 0 closed that epoch" in messages[1]
    assert "rank 1" in messages[0]
