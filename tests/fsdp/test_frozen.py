"""Frozen parameters: what they cost in memory, and what happens when they are unfrozen.

That training beside them is FSDP2's is for tests/parity ("frozen", "adapters").
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from support.compare import assert_same
from support.models import Case, own_gradients, own_parameters, tokens
from support.models import train as run_all
from support.on_ranks import on_ranks
from support.programs import PLAIN, Compared, Make, Programs, Result, backward, new, step
from support.ranks import Pools
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from odc import Settings, fully_shard
from odc.errors import PeerLostError, UnsupportedError
from odc.fsdp.root import root_of

ADAPTERS = Case(counts=((1, 1),), frozen="base")
PROGRAMS = Programs()


# memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", ["server", "direct"])
@on_ranks(2)
def test_only_what_is_trained_has_accumulators_and_staging(rank: int, world: int, accumulate: Any) -> None:
    """By the accounts of a model of adapters on a frozen base, and of one that is trained as a whole."""
    found = []
    for case in (ADAPTERS, PLAIN):
        model, optimizer = new(fully_shard, case, settings=Settings(accumulate=accumulate))
        step(model, optimizer, rank, 0)
        # Equal shards, padded along the first dimension.
        elements = sum(-(-len(p) // world) * p[0].numel() for p in model.parameters() if p.requires_grad)
        found.append((root_of(model).layout.ledger(), elements))
    (adapters, few), (everything, all_of_them) = found
    assert adapters["published"] == everything["published"]
    assert everything["accumulator"] == 4 * all_of_them
    # The root's own unit (embedding, norm, head) is frozen as a whole: an empty region is one line.
    assert adapters["accumulator"] == 4 * few + 64
    assert few < all_of_them / 20
    assert adapters["staging"] < everything["staging"] / 20 if accumulate == "server" else adapters["staging"] == 0


@on_ranks(1)
def test_units_know_the_dtypes_of_their_shards(rank: int, world: int) -> None:
    """By which kernels are tried: a frozen parameter in 8 bits may stand beside trained ones, which are converted."""
    model: Any = torch.nn.Linear(4, 4)
    model.codes = torch.nn.Parameter(torch.ones(8, dtype=torch.uint8), requires_grad=False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    params = root_of(model).layout.units[0].params
    found = {spec.name: spec.own_dtype for spec in params}
    assert found["weight"] == torch.float32 and found["codes"] == torch.uint8
    assert params[0].dtype == torch.bfloat16


# unfreezing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("explicit", [False, True], ids=["unchanged loop", "minibatch"])
@on_ranks(2)
def test_a_gradient_that_has_no_accumulator_is_an_error_that_names_the_cure(
    rank: int, world: int, explicit: bool
) -> None:
    model, optimizer = new(fully_shard, ADAPTERS)
    step(model, optimizer, rank, 0)
    model.layers[1].qkv.requires_grad_(True)

    def train() -> None:
        with model.minibatch() if explicit else contextlib.nullcontext():
            backward(model, rank, 1)

    with pytest.raises((UnsupportedError, PeerLostError)) as caught:
        train()
    message = str(caught.value)
    assert message.startswith(f"rank {rank} (epoch 2)"), message
    assert "(epoch 2): layers.1.qkv.weight has a gradient, but was frozen when it was sharded" in message
    assert "leave it requires_grad=True until after fully_shard, then freeze it" in message
    # A block aborts the job: a rank that has not come so far gets the other's reason.
    assert explicit or "aborted" not in message, message
    assert all(p.grad is None for p in model.parameters()), "a part of the gradients was handed out"


@on_ranks(2)
def test_an_unfrozen_model_may_be_evaluated(rank: int, world: int) -> None:
    """Without a gradient there is nothing to lose, and nothing to refuse."""
    model, _ = new(fully_shard, ADAPTERS)
    with torch.no_grad():
        before = model(tokens(rank, 0, 0))
        model.requires_grad_(True)
        after = model(tokens(rank, 0, 0))
    assert torch.equal(before, after), "another output"


@PROGRAMS.add
def frozen_after_sharding_then_unfrozen(shard_with: Make, rank: int, world: int) -> Result:
    """What the error recommends: the layers are trained one after the other, from the head down."""
    model, optimizer = new(shard_with)
    model.requires_grad_(False)
    losses: Result = {}
    for number, part in enumerate([model.head, *reversed(model.layers)]):
        part.requires_grad_(True)
        losses[f"loss{number}"] = step(model, optimizer, rank, number)
    return {**losses, **own_parameters(model)}


@PROGRAMS.add
def frozen_for_the_first_use(shard_with: Make, rank: int, world: int) -> Result:
    """As a library for adapters turns them off: the first forward is the reference's, without them."""
    model, optimizer = new(shard_with, ADAPTERS)
    adapters = [p for p in model.parameters() if p.requires_grad]
    for p in adapters:
        p.requires_grad_(False)
    with torch.no_grad():
        seen: Result = {"reference": model(tokens(rank, 9, 0)).clone()}
    for p in adapters:
        p.requires_grad_(True)
    for number in range(2):
        seen[f"loss{number}"] = step(model, optimizer, rank, number)
    return {**seen, **own_parameters(model)}


@PROGRAMS.add
def unfrozen_before_the_first_use(shard_with: Make, rank: int, world: int) -> Result:
    model, optimizer = new(shard_with, ADAPTERS)
    model.layers[0].requires_grad_(True)
    losses: Result = {f"loss{number}": step(model, optimizer, rank, number) for number in range(2)}
    return {**losses, **own_parameters(model)}


@PROGRAMS.add
def frozen_between_two_backwards(shard_with: Make, rank: int, world: int) -> Result:
    """By its end a minibatch has a gradient of what was trained at its beginning: by one backward, so to the bit."""
    model, _ = new(shard_with)
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        backward(model, rank, 0, microbatch=int(last))
        model.layers[0].requires_grad_(False)
    return {name: grad for name, grad in own_gradients(model).items() if name.startswith("layers.0.")}


@on_ranks(2)
def test_a_module_is_not_sharded_once_the_root_around_it_is_in_use(rank: int, world: int) -> None:
    """FSDP2 makes it a root of its own, which odc's, with one end of a minibatch, would not know of."""
    model, optimizer = new(fully_shard)
    step(model, optimizer, rank, 0)
    model.head = torch.nn.Linear(model.head.in_features, 5)
    with pytest.raises(UnsupportedError, match="around Linear is in use: shard every module of a model"):
        fully_shard(model.head)
    assert not isinstance(model.head.weight, DTensor), "it has been sharded"


@PROGRAMS.each()
def test_equals_torch_to_the_bit(ranks: Pools, program: Compared) -> None:
    ranks(2).run(program)


# other accumulators --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [Settings(accumulate="direct"), Settings(staging_block_bytes=4096)],
    ids=["direct", "small blocks"],
)
@on_ranks(2)
def test_adapters_with_other_accumulators(rank: int, world: int, settings: Settings) -> None:
    case = Case(counts=((1, 1),), frozen="base", low_precision=True)
    mine = run_all(fully_shard, case, rank, world, settings=settings)
    assert_same(mine, run_all(torch_fully_shard, case, rank, world))
