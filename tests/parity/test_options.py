"""Options of `fully_shard` and its modules: each program runs under FSDP2 and under odc, equal to the bit.

Where the sums must differ in rounding (fp16, more than two ranks, an unsharded reference) the test notes it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import differences
from support.models import Case, adamw, clip, make, next_token_loss, own_gradients, own_parameters, shard, tokens
from support.on_ranks import on_ranks
from support.programs import PLAIN, Compared, Make, Programs, Result, backward, new, step
from support.ranks import Pools
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

from odc import fully_shard

PROGRAMS = Programs()


@PROGRAMS.add
def sharded_along_columns(shard_with: Make, rank: int, world: int) -> Result:
    def place(p: torch.nn.Parameter) -> Shard:
        return Shard(1) if p.ndim == 2 and p.size(1) % world == 0 else Shard(0)

    # The width is odd; only `back`, with 100 columns, is divided along them. Frozen columns are fetched as well.
    model, optimizer = new(shard_with, shard_placement_fn=place)
    model.layers[0].back.weight.requires_grad_(False)
    assert model.layers[0].back.weight.placements == (Shard(1),), "the placement was not taken"
    for number in range(3):
        step(model, optimizer, rank, number)
    return own_parameters(model)  # type: ignore[return-value]


@PROGRAMS.add
def divide_factor(shard_with: Make, rank: int, world: int) -> Result:
    model, _ = new(shard_with)
    for module in (model, *model.layers):
        module.set_gradient_divide_factor(4.0)
        if shard_with is torch_fully_shard:
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    backward(model, rank, 0)
    return own_gradients(model)


@PROGRAMS.add
def unsharded_by_hand(shard_with: Make, rank: int, world: int) -> Result:
    model, optimizer = new(shard_with)
    losses: Result = {}
    for number in range(2):
        handle = model.layers[1].unshard(async_op=True)
        handle.wait()
        model.layers[0].unshard()
        losses[f"loss{number}"] = step(model, optimizer, rank, number)
        model.layers[2].unshard()
        model.layers[2].reshard()
    return {**losses, **own_parameters(model)}


@PROGRAMS.add
def kept_after_backward(shard_with: Make, rank: int, world: int) -> Result:
    model, optimizer = new(shard_with)
    model.set_reshard_after_backward(False)
    for _ in range(2):  # without a step in between, weights may stay
        backward(model, rank, 0)
    model.set_reshard_after_backward(True)
    backward(model, rank, 1)
    optimizer.step()
    return {**own_gradients(model), **{f"p.{name}": p for name, p in own_parameters(model).items()}}


@PROGRAMS.add
def prefetch_in_the_given_order(shard_with: Make, rank: int, world: int) -> Result:
    model, optimizer = new(shard_with)
    model.set_modules_to_forward_prefetch([model.layers[0], model.layers[1]])
    model.layers[0].set_modules_to_forward_prefetch([model.layers[2]])
    model.layers[2].set_modules_to_backward_prefetch([model.layers[0]])
    for number in range(3):
        step(model, optimizer, rank, number)
    return own_parameters(model)  # type: ignore[return-value]


@PROGRAMS.add
def inputs_cast_and_output_dtype(shard_with: Make, rank: int, world: int) -> Result:
    mesh, model = init_device_mesh("cpu", (world,)), make(PLAIN)
    for layer in model.layers:
        shard_with(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    shard_with(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    optimizer = adamw(model)
    logits = model(tokens(rank, 0, 0))
    assert logits.dtype is torch.float32, f"output is {logits.dtype}"
    F.cross_entropy(logits.flatten(0, 1), tokens(rank, 0, 0).flatten()).backward()
    optimizer.step()
    return own_parameters(model)  # type: ignore[return-value]


def _in_dtype(shard_with: Make, rank: int, world: int, dtype: torch.dtype) -> Result:
    model = shard(shard_with, make(PLAIN).to(dtype), PLAIN, init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients: Result = {}
    for number in range(2):
        backward(model, rank, number)
        gradients.update({f"{number}.{name}": grad for name, grad in own_gradients(model).items()})
        optimizer.step()
        optimizer.zero_grad()
    return {**gradients, **own_parameters(model)}


@PROGRAMS.add
def in_bf16(shard_with: Make, rank: int, world: int) -> Result:
    return _in_dtype(shard_with, rank, world, torch.bfloat16)


@PROGRAMS.add
def in_fp64(shard_with: Make, rank: int, world: int) -> Result:
    return _in_dtype(shard_with, rank, world, torch.float64)


@PROGRAMS.add
def frozen_in_another_dtype(shard_with: Make, rank: int, world: int) -> Result:
    model = make(PLAIN)
    for layer in model.layers:
        layer.qkv.to(torch.bfloat16).requires_grad_(False)
    case = Case(counts=((1, 1),), low_precision=True)
    model = shard(shard_with, model, case, init_device_mesh("cpu", (world,)))
    optimizer = adamw(model)
    for number in range(2):
        step(model, optimizer, rank, number)
    return own_parameters(model)  # type: ignore[return-value]


@PROGRAMS.add
def some_parameters_ignored(shard_with: Make, rank: int, world: int) -> Result:
    model = make(PLAIN)
    ignored = model.norm.weight
    model = shard(shard_with, model, PLAIN, init_device_mesh("cpu", (world,)), ignored_params={ignored})
    assert model.norm.weight is ignored, "an ignored parameter was sharded"
    backward(model, rank, 0)
    assert ignored.grad is not None, "an ignored parameter has no gradient"
    return {name: p.grad.to_local() for name, p in model.named_parameters() if p is not ignored}


@on_ranks(2)
def test_fp16_parameters(rank: int, world: int) -> None:
    """Ours adds in fp32 and rounds once; FSDP2 adds in fp16, divided before and after to stay in range."""
    mine, reference = (_in_dtype(each, rank, world, torch.float16) for each in (fully_shard, torch_fully_shard))
    wrong = differences(mine, reference, lambda b: 2.0**-9 * b.abs() + 2.0**-23)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("world", "after_forward"), [(2, False), (2, True), (4, 2)])
@on_ranks()
def test_reshard_after_forward(rank: int, world: int, after_forward: bool | int) -> None:
    results = []
    for shard_with in (fully_shard, torch_fully_shard):
        model, optimizer = new(shard_with, reshard_after_forward=after_forward)
        for number in range(3):
            step(model, optimizer, rank, number)
            with torch.no_grad():
                model(tokens(rank, number, 9))
        results.append(own_parameters(model))
    wrong = differences(results[0], results[1], lambda b: 1e-5 * b.abs() + 1e-6 if world > 2 else 0 * b)
    assert not wrong, "\n".join(wrong)


@on_ranks(2)
def test_layers_left_out_by_rank(rank: int, world: int) -> None:
    """In each step other layers are left out, another on each rank; the reference runs every rank's data unsharded."""
    model, optimizer = new(fully_shard)
    whole = make(PLAIN)
    whole_optimizer = adamw(whole)
    missing = 0
    skips = [((1,), ()), ((), (1, 2)), ((0,), (0,)), ((2,), (0,))]
    for number, by_rank in enumerate(skips):
        for other, skip in enumerate(by_rank):
            (backward_of(whole, other, number, skip) / world).backward()
        backward_of(model, rank, number, by_rank[rank]).backward()
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (
                f"step {number}: {name} has {'no' if p.grad is None else 'a'} .grad"
            )
            missing += p.grad is None
        clip(model, 0.5)
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        for one in (optimizer, whole_optimizer):
            one.step()
            one.zero_grad()
    gathered = {name: p.full_tensor() for name, p in model.named_parameters()}
    wrong = differences(gathered, dict(whole.named_parameters()), lambda b: 1e-6 + 1e-5 * b.abs())
    assert not wrong, "\n".join(wrong)
    assert missing > 0


def backward_of(model: Any, rank: int, number: int, skip: tuple[int, ...]) -> torch.Tensor:
    x = tokens(rank, number, 0)
    return next_token_loss(model(x, skip=skip), x) / 18


@PROGRAMS.each()
def test_equals_torch_to_the_bit(ranks: Pools, program: Compared) -> None:
    ranks(2).run(program)
