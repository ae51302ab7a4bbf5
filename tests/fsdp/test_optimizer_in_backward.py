"""An optimizer that steps in a post-accumulate-grad hook, parameter by parameter, equals torch's bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import own_parameters
from support.on_ranks import on_ranks
from support.programs import Compared, Make, Programs, Result, backward, new
from support.ranks import Pools

from odc import fully_shard
from odc.errors import UnfinishedMinibatchError
from odc.fsdp import root_of

programs = Programs()


def step_in_hooks(model: Any) -> list[str]:
    """Give every parameter an optimizer that steps as soon as its gradient is there; returns what stepped."""
    stepped: list[str] = []
    for name, parameter in model.named_parameters():
        optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1, eps=1e-4)

        def step(given: torch.Tensor, name: str = name, optimizer: torch.optim.Optimizer = optimizer) -> None:
            assert given.grad is not None
            optimizer.step()
            optimizer.zero_grad()
            stepped.append(name)

        parameter.register_post_accumulate_grad_hook(step)
    return stepped


@programs.add
def every_backward_steps(make: Make, rank: int, world: int) -> Result:
    model, _ = new(make)
    stepped = step_in_hooks(model)
    losses = [backward(model, rank, number) for number in range(4)]
    assert len(stepped) == 4 * len(list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    return {**own_parameters(model), "losses": torch.stack(losses)}


@programs.each()
def test_equals_torch_to_the_bit(ranks: Pools, program: Compared) -> None:
    ranks(2).run(program)


@on_ranks(2)
def test_the_hooks_run_at_the_last_microbatch_only(rank: int, world: int) -> None:
    model, _ = new(fully_shard)
    stepped = step_in_hooks(model)
    for microbatch in range(3):
        assert stepped == []
        model.set_requires_gradient_sync(microbatch == 2)
        backward(model, rank, 0, microbatch)
    assert sorted(stepped) == sorted(name for name, _ in model.named_parameters())


@on_ranks(2)
def test_ranks_without_a_microbatch_step_too(rank: int, world: int) -> None:
    model, _ = new(fully_shard)
    step_in_hooks(model)
    before = own_parameters(model)
    with model.minibatch():
        for microbatch in range(rank):  # rank 0 has none
            backward(model, rank, 0, microbatch)
    after = own_parameters(model)
    assert any(not torch.equal(before[name], after[name]) for name in before)


@on_ranks(2)
def test_a_step_between_the_two_halves_of_the_end_is_refused(rank: int, world: int) -> None:
    """A step by user code, after every gradient was sent and before any is written."""
    model, optimizer = new(fully_shard)
    machine = root_of(model).minibatch
    with model.minibatch():
        if rank:
            backward(model, rank, 0)
        machine.done()
        with pytest.raises(UnfinishedMinibatchError, match=r"rank \d .*: optimizer.step\(\) before .*gradients"):
            optimizer.step()
        machine.collect()
        machine.begin()
    optimizer.step()
