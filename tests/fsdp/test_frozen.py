"""Frozen parameters: what they cost in memory, and what happens when they are unfrozen.

That training beside them is FSDP2's is for tests/parity ("frozen", "adapters").
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import assert_same
from support.models import Case, adamw, make, next_token_loss, own_parameters, shard, tokens
from support.models import train as run_all
from support.on_ranks import on_ranks
from support.programs import Compared, Make, Programs, Result, new, step
from support.ranks import RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from odc import Settings, fully_shard
from odc.errors import PeerLostError, UnsupportedError
from odc.fsdp.root import root_of

Pools = Callable[[int], RankPool]

ADAPTERS = Case(counts=((1, 1),), frozen="base")
PROGRAMS = Programs()


# memory --------------------------------------------------------------------------------------------------------------


def ledgers(rank: int, world: int, accumulate: str) -> dict[str, Any]:
    """The account of a model of adapters on a frozen base, and of one that is trained as a whole."""
    settings = Settings(accumulate=accumulate)  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    for name, case in {"adapters": ADAPTERS, "all": Case(counts=((1, 1),))}.items():
        model = shard(fully_shard, make(case), case, init_device_mesh("cpu", (world,)), settings=settings)
        step(model, adamw(model), rank, 0)
        root = root_of(model)
        # Equal shards, padded along the first dimension.
        numels = [-(-len(p) // world) * p[0].numel() for p in model.parameters() if p.requires_grad]
        found[name] = {**root.layout.ledger(), "elements": sum(numels), "units": len(root.groups)}
    return found


@pytest.mark.parametrize("accumulate", ["server", "direct"])
def test_only_what_is_trained_has_accumulators_and_staging(ranks: Pools, accumulate: str) -> None:
    for found in ranks(2).run(ledgers, accumulate):
        adapters, everything = found["adapters"], found["all"]
        assert adapters["published"] == everything["published"]
        assert everything["accumulator"] == 4 * everything["elements"]
        # The root's own unit (embedding, norm, head) is frozen as a whole: an empty region is one line.
        assert adapters["accumulator"] == 4 * adapters["elements"] + 64
        assert adapters["elements"] < everything["elements"] / 20
        if accumulate == "server":
            assert adapters["staging"] < everything["staging"] / 20
        else:
            assert adapters["staging"] == 0


# unfreezing ----------------------------------------------------------------------------------------------------------


def unfrozen_late(rank: int, world: int, explicit: bool) -> list[str]:
    model = shard(fully_shard, make(ADAPTERS), ADAPTERS, init_device_mesh("cpu", (world,)))
    step(model, adamw(model), rank, 0)
    model.layers[1].qkv.requires_grad_(True)
    x = tokens(rank, 1, 0)

    def train() -> None:
        with model.minibatch() if explicit else contextlib.nullcontext():
            next_token_loss(model(x), x).backward()

    with pytest.raises((UnsupportedError, PeerLostError)) as caught:
        train()
    kept = [name for name, p in model.named_parameters() if p.grad is not None]
    return [str(caught.value), *kept]


@pytest.mark.parametrize("explicit", [False, True], ids=["unchanged loop", "minibatch"])
def test_a_gradient_that_has_no_accumulator_is_an_error_that_names_the_cure(ranks: Pools, explicit: bool) -> None:
    for rank, (message, *kept) in enumerate(ranks(2).run(unfrozen_late, explicit)):
        assert "(epoch 2): layers.1.qkv.weight has a gradient, but was frozen when it was sharded" in message
        assert "leave it requires_grad=True until after fully_shard, then freeze it" in message
        assert not kept, "a part of the gradients was handed out"
        # A block aborts the job: a rank that has not come so far gets the other's reason.
        assert message.startswith(f"rank {rank} (epoch 2)"), message
        assert explicit or "aborted" not in message, message


@on_ranks(2)
def test_an_unfrozen_model_may_be_evaluated(rank: int, world: int) -> None:
    """Without a gradient there is nothing to lose, and nothing to refuse."""
    model = shard(fully_shard, make(ADAPTERS), ADAPTERS, init_device_mesh("cpu", (world,)))
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
