"""Four ranks: other layouts. Sums of four may differ in order, so these are equal to fp32 rounding.

The first step's gradients are held to a few units in the last place; later steps inherit what AdamW makes of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import Oracle, assert_same, assert_trained_alike, differences
from support.models import (
    Case,
    Run,
    adamw,
    build,
    clip,
    next_token_loss,
    own_gradients,
    own_parameters,
    reduced_exactly,
    token_share,
    tokens,
    train,
)
from support.on_ranks import on_ranks
from support.ranks import Pools
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import odc
from odc import Settings, fully_shard
from odc.errors import UnsupportedError

UNEQUAL = ((1, 3, 2, 0), (2, 0, 1, 1), (0, 0, 4, 1))
ONE = ((1, 1, 1, 1),)


@functools.cache
def flat() -> DeviceMesh:
    return init_device_mesh("cpu", (4,))


@functools.cache
def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


@functools.cache
def _reference(case: Case, rank: int, hybrid: bool) -> Run:
    mesh = grid() if hybrid else flat()
    return train(torch_fully_shard, case, rank, 4, mesh=mesh, pad=case.idiom != "each")


@pytest.mark.parametrize("reproducible", [False, True], ids=["fp32", "fp64"])
@on_ranks(4)
def test_hybrid_accumulators_are_within_rounding_of_the_oracle(rank: int, world: int, reproducible: bool) -> None:
    case, settings = Case(counts=((2, 0, 3, 1),)), Settings(reproducible=reproducible)
    model = build(fully_shard, case, grid(), settings=settings)
    weights = {name: p.full_tensor() for name, p in model.state_dict().items()}
    oracle, share = Oracle(weights, case, 0, world), token_share(case.of(0), world)
    with model.minibatch():
        for i in range(case.of(0)[rank]):
            x = tokens(rank, 0, i)
            (next_token_loss(model(x), x) * share).backward()
    inner = grid().get_local_rank("inner")
    unit = 2.0**-53 if settings.reproducible else 2.0**-24
    wrong = oracle.errors(own_gradients(model), inner, 2, unit=unit, roundings=oracle.pushes + 1)
    assert not wrong, "\n".join(wrong)


def subgroups(rank: int, world: int) -> int:
    """Two jobs of two ranks each, which run different numbers of minibatches."""
    mesh = grid()["inner"]
    mine = grid().get_local_rank("inner")
    case = Case(counts=((1, 2), (3, 1)), idiom="minibatch", steps=2 if rank < 2 else 5)
    settings = Settings(reproducible=True)
    run = train(fully_shard, case, mine, 2, mesh=mesh, settings=settings)
    assert_same(run, train(torch_fully_shard, case, mine, 2, mesh=mesh, pad=True, **reduced_exactly(case)))
    return len(run.losses)


@pytest.mark.parametrize("how", ["after_evaluation", "together"])
@on_ranks(4)
def test_two_roots_in_one_backward_in_opposite_orders(rank: int, world: int, how: str) -> None:
    """Two models in one backward, which odd ranks run, and so finish, in the other order.

    What lets ranks do that is that both epochs are open before: by `odc.minibatch`, or by an evaluation of each.
    """
    weights = (1 / 9, 1 / 18)

    def run(shard: Callable[..., Any]) -> dict[str, torch.Tensor]:
        models = [build(shard, Case(counts=ONE, layers=1), flat()) for _ in range(2)]
        optimizers = [adamw(model) for model in models]
        mine = shard is fully_shard
        order = (1, 0) if mine and rank % 2 == 1 else (0, 1)
        for step in range(3):
            x, begun = tokens(rank, step, 0), list[int]()
            if how == "after_evaluation":
                with torch.no_grad():
                    for model in models:
                        model(x)
            with odc.minibatch(*models) if mine and how == "together" else contextlib.nullcontext():
                losses = []
                for i in order:
                    logits = models[i](x)
                    logits.register_hook(lambda grad, i=i, begun=begun: begun.append(i))
                    losses.append(next_token_loss(logits, x) * weights[i])
                (losses[0] + losses[1]).backward()
            assert begun == list(order[::-1]), f"backward took the models in order {begun}"
            for model, optimizer in zip(models, optimizers, strict=True):
                clip(model, 0.5)
                optimizer.step()
                optimizer.zero_grad()
        return {f"{i}.{name}": p for i, model in enumerate(models) for name, p in own_parameters(model).items()}

    wrong = differences(run(fully_shard), run(torch_fully_shard), lambda b: 1e-5 + 1e-4 * b.abs())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("sharding", ["mesh", "world"])
@on_ranks(4)
def test_gradients_come_when_the_loop_has_replicas_summed(rank: int, world: int, sharding: str) -> None:
    """Until then FSDP2 keeps partial sums in the reduce dtype; an optimizer in a hook steps once."""

    def run(shard: Callable[..., Any], **options: Any) -> tuple[dict[str, torch.Tensor | None], list[str]]:
        seen, written = dict[str, torch.Tensor | None](), list[str]()
        model = build(shard, Case(counts=ONE, layers=1, low_precision=True), grid(), **options)
        if shard is fully_shard:
            with pytest.raises(UnsupportedError, match="^set_requires_all_reduce.recurse=False. has no meaning"):
                model.set_requires_all_reduce(False, recurse=False)
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: written.append(name))
        for microbatch in range(3):
            model.set_requires_all_reduce(microbatch == 2)
            x = tokens(rank, 0, microbatch)
            next_token_loss(model(x), x).backward()
            seen |= {f"{microbatch} {name}": one for name, one in full_gradients(model).items()}
        return seen, sorted(written)

    seen, written = run(fully_shard, **({} if sharding == "mesh" else {"optimizer_sharding": "world"}))
    reference, hooked = run(torch_fully_shard)
    assert written == hooked
    wrong = differences(seen, reference, lambda b: 1e-6 + 0.01 * b.abs())
    assert not wrong, "\n".join(wrong)


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {name: None if one is None else one.full_tensor() for name, one in gradients.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("ranks_of_mesh", [[[0, 1], [2, 3]], [[2, 3], [0, 1]]], ids=["rising", "falling"])
@on_ranks(4)
def test_tensor_parallel_inside(rank: int, world: int, ranks_of_mesh: list[list[int]]) -> None:
    grid = DeviceMesh("cpu", ranks_of_mesh, mesh_dim_names=("outer", "inner"))

    def run(shard: Callable[..., object]) -> Run:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(18, 34), nn.GELU(), nn.Linear(34, 18)) for _ in range(2)])
        for block in model:
            parallelize_module(block, grid["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            shard(block, mesh=grid["outer"])
        shard(model, mesh=grid["outer"])
        optimizer = adamw(model)
        run = Run()
        data = grid.get_local_rank("outer")
        for step in range(3):
            x = torch.randn(4, 18, generator=torch.Generator().manual_seed(10 * step + data))
            loss = F.mse_loss(model(x), x.roll(1, 0))
            loss.backward()
            run.losses.append([loss.item()])
            run.gradients.append(own_gradients(model))
            run.norms.append(clip(model, 0.1))
            optimizer.step()
            optimizer.zero_grad()
        run.parameters = own_parameters(model)
        return run

    assert_same(run(fully_shard), run(torch_fully_shard))


MANY: dict[str, Any] = {"counts": UNEQUAL, "idiom": "minibatch", "layers": 2}
CASES: dict[str, tuple[Case, Settings]] = {
    "unequal": (Case(**MANY, tied=True), Settings()),
    "unequal direct": (Case(**MANY, tied=True), Settings(accumulate="direct")),
    "bf16": (Case(**MANY, low_precision=True, checkpointing="wrapper", frozen="layer"), Settings()),
    "adapters": (Case(**MANY, low_precision=True, frozen="base"), Settings(reproducible=True)),
    "unchanged loop": (Case(counts=ONE, layers=2), Settings()),
}


@pytest.mark.parametrize(
    ("name", "hybrid"),
    [
        # Two ranks show what shards alone do; four, what their layout adds.
        pytest.param(name, hybrid, marks=() if hybrid or name == "unequal" else pytest.mark.thorough)
        for name in CASES
        for hybrid in (False, True)
    ],
)
@on_ranks(4)
def test_equals_fsdp2_but_for_rounding(rank: int, world: int, name: str, hybrid: bool) -> None:
    case, settings = CASES[name]
    mesh = grid() if hybrid else flat()
    run = train(fully_shard, case, rank, world, mesh=mesh, settings=settings)
    assert_trained_alike(run, _reference(case, rank, hybrid), low_precision=case.low_precision)


def test_two_jobs_on_halves_of_the_ranks(ranks: Pools) -> None:
    assert ranks(4).run(subgroups) == [2, 2, 5, 5]
