"""Loops that mix what the other files test alone: two models, marks inside marks, graphs used twice."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import differences
from support.models import VOCABULARY, next_token_loss, own_gradients, own_parameters, reduced_exactly, tokens
from support.on_ranks import on_hosts, on_ranks
from support.programs import PLAIN, Compared, Make, Programs, Result, backward, new
from support.ranks import Pools
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage

import odc
from odc import OdcError, Settings, fully_shard

PROGRAMS = Programs()
COUNTS = ((1, 3), (2, 0), (0, 2))


def exact(make: Make) -> tuple[Any, torch.optim.Optimizer]:
    """Models in which several pushes are summed alike, to the bit."""
    return new(make, **({"settings": Settings(reproducible=True)} if make is fully_shard else reduced_exactly(PLAIN)))


def at_last(model: Any, count: int, mark: Callable[[bool], None], run: Callable[[int], object]) -> None:
    """Run `count` microbatches, of which the last is marked."""
    for i in range(count):
        mark(i == count - 1)
        run(i)


def run_all(make: Make, models: list[Any], counts: tuple[int, ...], rank: int, run: Callable[[int], object]) -> None:
    """A minibatch with unequal counts, whose gradients are of the first model; the reference pads, as FSDP2 must."""
    if make is fully_shard:
        with odc.minibatch(*models):
            for i in range(counts[rank]):
                run(i)
    else:
        at_last(models[0], max(counts), models[0].set_requires_gradient_sync, run)


# marks inside minibatch() ----------------------------------------------------------------------------------------


def marked_inside(make: Make, rank: int, world: int, how: str) -> Result:
    """A trainer that marks its microbatches, run inside `minibatch()`: the block decides, marks change nothing.

    FSDP2 pads with microbatches of weight 0 to as many on each rank.
    """
    model, optimizer = exact(make)
    seen: Result = {}
    for step, counts in enumerate(COUNTS):

        def run(i: int, step: int = step, counts: tuple[int, ...] = counts) -> None:
            x = tokens(rank, step, i)
            (next_token_loss(model(x), x) * (0.1 if i < counts[rank] else 0.0)).backward()

        if make is fully_shard:
            with model.minibatch():
                at_last(model, counts[rank], getattr(model, how, lambda last: None), run)
        else:
            at_last(model, max(counts), model.set_requires_gradient_sync, run)
        seen |= {f"{step} {name}": gradient for name, gradient in own_gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return {**seen, **own_parameters(model)}


@PROGRAMS.add
def unmarked(make: Make, rank: int, world: int) -> Result:
    return marked_inside(make, rank, world, "no mark")


@PROGRAMS.add
def marked_by_gradient_sync(make: Make, rank: int, world: int) -> Result:
    return marked_inside(make, rank, world, "set_requires_gradient_sync")


@PROGRAMS.add
def marked_as_last_backward(make: Make, rank: int, world: int) -> Result:
    return marked_inside(make, rank, world, "set_is_last_backward")


@on_ranks(2)
def test_finish_inside_a_minibatch_is_refused_on_every_rank(rank: int, world: int) -> None:
    model, _ = new(fully_shard, settings=Settings(timeout_s=60.0))

    def minibatch() -> None:
        with model.minibatch():
            if rank == 0:
                model.finish_minibatch()

    with pytest.raises(OdcError, match=r"rank 0.*finish_minibatch\(\) inside"):
        minibatch()


# graphs and forwards ---------------------------------------------------------------------------------------------


@PROGRAMS.add
def backward_twice(make: Make, rank: int, world: int) -> Result:
    model, _ = exact(make)
    x = tokens(rank, 0, 0)
    loss = next_token_loss(model(x), x) / 18
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    return own_gradients(model)


@PROGRAMS.add
def forward_before_the_block(make: Make, rank: int, world: int) -> Result:
    model, _ = exact(make)
    x = tokens(rank, 0, 0)
    loss = next_token_loss(model(x), x) / 18
    with model.minibatch() if make is fully_shard else contextlib.nullcontext():
        loss.backward()
    return own_gradients(model)


@PROGRAMS.add
def inference_first(make: Make, rank: int, world: int) -> Result:
    """Under FSDP2 the unsharded parameters would be inference tensors for good, and training fails: no_grad there."""
    model, optimizer = new(make)
    with torch.inference_mode() if make is fully_shard else torch.no_grad():
        seen = model(tokens(rank, 0, 0)).clone()
    for step in range(2):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return {"seen": seen, **own_parameters(model)}


@PROGRAMS.add
def gradients_of_inputs(make: Make, rank: int, world: int) -> Result:
    """Only activations are asked for: no parameter gets a gradient, and the next minibatch is as if it had not been."""
    model, _ = new(make)
    for layer in model.layers:
        layer.requires_grad_(False)
    model.layers[0].register_forward_pre_hook(lambda module, args: args[0].requires_grad_(True))
    backward(model, rank, 0)
    return own_gradients(model)


@PROGRAMS.add
def no_grad_inside(make: Make, rank: int, world: int) -> Result:
    """A forward without gradients between the forward and backward of a microbatch (a baseline, a metric)."""
    model, optimizer = new(make)
    seen: Result = {}
    for step in range(2):
        x = tokens(rank, step, 0)
        loss = next_token_loss(model(x), x) / 18
        with torch.no_grad():
            seen[f"metric{step}"] = model(tokens(rank, step, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**seen, **own_parameters(model)}


@PROGRAMS.add
def a_stage_of_a_pipeline(make: Make, rank: int, world: int) -> Result:
    """A stage of torch's marks no backward as the last; it reduces afterwards, by calls outside of any backward."""
    model, optimizer = exact(make)
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("data", "stage"))
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=mesh["stage"].get_group())
    seen: Result = {}
    for step in range(3):
        inputs = [tokens(rank, step, i) for i in range(2)]
        losses = [next_token_loss(model(x), x) / 18 for x in inputs]
        for x, loss in zip(inputs, losses, strict=True):
            one = {"stage_output": loss, "output_grads": None, "input_values": [x]}
            stage.backward_maybe_with_nosync("full", one)
        assert all(gradient is None for gradient in own_gradients(model).values())
        stage.perform_reduce_grad(2)
        seen |= {f"{step} {name}": gradient for name, gradient in own_gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return {**seen, **own_parameters(model)}


# a teacher -------------------------------------------------------------------------------------------------------


def distilled(make: Make, rank: int, world: int, together: bool) -> Result:
    """A student learns from a frozen teacher, with unequal counts; the reference pads, as FSDP2 must."""
    student, optimizer = exact(make)
    teacher, _ = exact(make)
    teacher.requires_grad_(False)
    if make is fully_shard and not together:
        with torch.no_grad():
            teacher(tokens(rank, 99, 0))  # from here on its epoch stays open: ranks may call it as they like
    for step in range(4):
        counts = COUNTS[step % 3]

        def microbatch(i: int, step: int = step, counts: tuple[int, ...] = counts) -> None:
            x = tokens(rank, step, i)
            with torch.no_grad():
                wanted = teacher(x).softmax(-1)
            weight = world / sum(counts) if i < counts[rank] else 0.0
            (F.cross_entropy(student(x).flatten(0, 1), wanted.flatten(0, 1)) * weight).backward()

        run_all(make, [student, teacher] if together else [student], counts, rank, microbatch)
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.grad is None for p in teacher.parameters()), "the teacher has gradients"
    return dict(own_parameters(student))


@PROGRAMS.add
def a_frozen_teacher_in_the_same_minibatch(make: Make, rank: int, world: int) -> Result:
    return distilled(make, rank, world, True)


@PROGRAMS.add
def a_frozen_teacher_that_was_opened_once(make: Make, rank: int, world: int) -> Result:
    return distilled(make, rank, world, False)


@PROGRAMS.add
def a_frozen_judge_through_which_gradients_flow(make: Make, rank: int, world: int) -> Result:
    """Its backwards end no minibatch: it has no gradients, and ranks run it as often as they have microbatches."""
    student, optimizer = exact(make)
    torch.manual_seed(7)
    judge: Any = nn.Sequential(nn.Linear(VOCABULARY, 4), nn.Linear(4, 1)).requires_grad_(False)
    for part in (*judge, judge):
        make(part, **({"settings": Settings(timeout_s=20.0)} if make is fully_shard else {}))
    for step, counts in enumerate((*COUNTS, COUNTS[0])):

        def microbatch(i: int, step: int = step, counts: tuple[int, ...] = counts) -> None:
            verdict = judge(student(tokens(rank, step, i))).square().sum()
            (verdict * (0.1 if i < counts[rank] else 0.0)).backward()

        run_all(make, [student], counts, rank, microbatch)
        optimizer.step()
        optimizer.zero_grad()
    return dict(own_parameters(student))


# one rank evaluates, the other trains ----------------------------------------------------------------------------


@PROGRAMS.add
def only_one_rank_evaluates(make: Make, rank: int, world: int) -> Result:
    """Harmless: the evaluation's epoch is the one the other rank trains in."""
    model, optimizer = new(make)
    for step in range(3):
        if make is fully_shard and rank == step % 2:
            with torch.no_grad():
                model(tokens(rank, step, 5))
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return dict(own_parameters(model))


@PROGRAMS.each()
def test_equals_torch_to_the_bit(ranks: Pools, program: Compared) -> None:
    ranks(2).run(program)


@on_ranks(2)
def test_epochs_that_part_are_refused(rank: int, world: int) -> None:
    """Rank 0 evaluates and publishes, rank 1 trains: their epochs part, and each learns of it."""
    model, _ = new(fully_shard, settings=Settings(timeout_s=60.0))
    x = tokens(rank, 0, 0)
    if rank == 0:
        with torch.no_grad():
            model(x)
        model.publish()

    def train() -> None:
        for _ in range(2):
            backward(model, rank, 0)

    with pytest.raises(OdcError, match="rank 1" if rank == 0 else "rank 0 closed that epoch"):
        train()


@pytest.mark.parametrize("changes", ["off", "on"])
@on_hosts(2, 1)
def test_epochs_that_part_are_refused_over_hosts(rank: int, world: int, changes: Any) -> None:
    """Rank 0 learns of it sooner, in `publish()`: it waits there until the other host has read its sums."""
    model, _ = new(fully_shard, settings=Settings(timeout_s=60.0, changes=changes))

    def part() -> None:
        if rank == 0:
            with torch.no_grad():
                model(tokens(rank, 0, 0))
            model.publish()
            pytest.fail("the next epoch has begun")
        for _ in range(2):
            backward(model, rank, 0)

    with pytest.raises(OdcError, match="rank 1 trained in epoch 1, but rank 0 closed that epoch"):
        part()


# torch's default device ------------------------------------------------------------------------------------------


def trained_under(device: str, rank: int, settings: Settings) -> Result:
    """Gradients of minibatches during which `device` is torch's default; the model and its inputs lie on the CPU."""
    model, _ = new(fully_shard, settings=settings)
    inputs = [{"x": tokens(rank, 0, i), "none": torch.zeros(0, 3)} for i in range(2)]
    torch.set_default_device(device)
    try:
        with torch.no_grad():
            model(inputs[0]["x"])
        model.publish()
        for _ in range(2):
            with model.minibatch():
                for claimed in model.claim(inputs):
                    assert claimed["none"].device.type == "cpu"
                    (next_token_loss(model(claimed["x"]), claimed["x"]) / 18).backward()
    finally:
        torch.set_default_device(None)
    return own_gradients(model)


def assert_no_device_matters(rank: int, settings: Settings) -> None:
    found, expected = (trained_under(device, rank, settings) for device in ("meta", "cpu"))
    assert not differences(found, expected, None)


SHARED = Settings(queue_bytes=1 << 16, reproducible=True, timeout_s=60.0)


@on_ranks(2)
def test_the_default_device_does_not_matter(rank: int, world: int) -> None:
    assert_no_device_matters(rank, SHARED)


@on_hosts(2, 1)
def test_the_default_device_does_not_matter_over_hosts(rank: int, world: int) -> None:
    assert_no_device_matters(rank, dataclasses.replace(SHARED, changes="on"))
