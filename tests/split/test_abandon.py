"""Minibatches with pieces that are given up, on ranks: all learn of it, and the weights are as without them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.ranks import spawn_ranks
from support.split_jobs import LONGEST, Minibatch, loss_of, losses_whole, model_of, tokens_of

from odc import AbandonedMinibatchError, Settings, fully_shard
from odc.errors import OdcError, PeerLostError
from odc.split import Splitter

WORLD = 3
CAUGHT = ("in forward", "in backward", "between them", "no backward", "asked", "asked and run", "left", "never came")


class Boom(Exception):
    """Stands for whatever a piece raises."""


@dataclass(frozen=True)
class Fault:
    """What `rank` does wrong, and in which of its own pieces; `how` is one of `CAUGHT`."""

    rank: int
    piece: int
    how: str


@dataclass(frozen=True)
class Job:
    """Minibatches, and for each the fault that costs it, if any does."""

    minibatches: list[Minibatch]
    faults: list[Fault | None]
    keep: bool = True
    checkpoint: bool = False


def boom(*unused: Any) -> None:
    raise Boom


def run_piece(model: Any, piece: Any, minibatch: Minibatch, how: str) -> None:
    """Run a piece; a fault that `how` names is caught, as a loop that survives bad samples does."""
    layer: Any = model.model.layers[1]
    inputs = piece.of(tokens_of(piece.sample, minibatch.lengths[piece.sample]))
    if how.startswith("asked"):
        model.abandon_minibatch("asked to")
        if how == "asked":
            return
    handle: Any = None
    if how == "in forward":
        handle = layer.register_forward_pre_hook(boom)
    if how == "in backward":
        handle = layer.register_forward_hook(lambda module, args, out: out.register_hook(boom) and None)
    try:
        loss = loss_of(model, *inputs)
        if how == "between them":
            boom()
        if how != "no backward":
            loss.backward()
    except Boom:
        pass
    finally:
        if handle is not None:
            handle.remove()


def one_minibatch(model: Any, splitter: Splitter, minibatch: Minibatch, rank: int, fault: Fault | None) -> None:
    plan, how = minibatch.plan(WORLD), fault.how if fault is not None and fault.rank == rank else ""
    with model.minibatch():
        if how != "never came":
            for number, piece in enumerate(splitter.pieces(plan)):
                hit = fault is not None and number == fault.piece
                run_piece(model, piece, minibatch, how if hit else "")
                if hit and how == "left":
                    break
        else:
            model.abandon_minibatch("a sample could not be read")
        for loss in losses_whole(model, minibatch, [i for microbatch in plan.ranks[rank] for i in microbatch]):
            loss.backward()


def sharded(job: Job) -> Any:
    model: Any = model_of("llama", checkpoint=job.checkpoint)
    for unit in [*model.model.layers, model]:
        fully_shard(unit, settings=Settings(reproducible=True, timeout_s=60.0))
    return model


def trained(job: Job, rank: int, name: str) -> tuple[list[torch.Tensor], list[str]]:
    """This rank's shards after the job, and of each minibatch why it was lost, or nothing."""
    model = sharded(job)
    splitter = Splitter(model, LONGEST, piece_tokens=100, keep=job.keep, timeout_s=60.0, name=name)
    optimizer, lost = torch.optim.AdamW(model.parameters(), 0.003), list[str]()
    for minibatch, fault in zip(job.minibatches, job.faults, strict=True):
        try:
            one_minibatch(model, splitter, minibatch, rank, fault)
        except AbandonedMinibatchError as error:
            lost.append(f"rank {error.culprit}: {error.reason}")
            assert all(parameter.grad is None for parameter in model.parameters())
            continue
        lost.append("")
        optimizer.step()
        optimizer.zero_grad()
    splitter.close()
    return [parameter.detach().to_local().clone() for parameter in model.parameters()], lost


def as_without_them(rank: int, world: int, name: str, job: Job) -> list[str]:
    """Returns why minibatches were lost, after comparing bit by bit with a run that never had those."""
    weights, lost = trained(job, rank, name)
    good = [minibatch for minibatch, why in zip(job.minibatches, lost, strict=True) if not why]
    expected, none = trained(Job(good, [None] * len(good), job.keep, job.checkpoint), rank, f"{name}.good")
    assert none == [""] * len(good)
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True)), lost
    return lost


GANGS = Minibatch([(60, [0, 1], "zigzag"), (61, [1, 2], "zigzag"), (70, [2, 0, 1], "contiguous")], [(9, 0), (7, 2)])
NOT_RUN = "rank 1: rank 1: the piece of sample 1 was not run forward and backward through all 3 layers"
REASONS = {
    "in backward": "rank 1: a backward ended with an exception",
    "asked": "rank 1: asked to",
    "asked and run": "rank 1: asked to",
    "left": "rank 1: rank 1 left the loop over its pieces before the last 1",
    "never came": "rank 1: a sample could not be read",
}


@pytest.mark.parametrize(("keep", "checkpoint"), [(True, False), pytest.param(False, True, marks=pytest.mark.thorough)])
def test_a_piece_that_fails_costs_the_minibatch_on_all_ranks(ranks: Any, keep: bool, checkpoint: bool) -> None:
    """Every fault in its turn, and a good minibatch after every second one."""
    faults = [fault for how in CAUGHT for fault in (Fault(1, 1, how), *([None] if CAUGHT.index(how) % 2 else []))]
    job = Job([GANGS] * len(faults), faults, keep, checkpoint)
    for lost in ranks(WORLD).run(as_without_them, uuid.uuid4().hex, job):
        for fault, why in zip(faults, lost, strict=True):
            assert why.startswith(REASONS.get(fault.how, NOT_RUN)) if fault else not why, (fault, why)


@pytest.mark.parametrize("then", [(), (None,)], ids=["closes", "goes on"])
def test_a_rank_that_gives_the_first_minibatch_up_before_it_has_an_arena(ranks: Any, then: tuple[None, ...]) -> None:
    faults = [Fault(1, 0, "never came"), *then]
    for lost in ranks(WORLD).run(as_without_them, uuid.uuid4().hex, Job([GANGS] * len(faults), faults)):
        assert [bool(why) for why in lost] == [True, False][: len(faults)]


@st.composite
def jobs(draw: Any) -> Job:
    gangs = st.permutations(range(WORLD)).flatmap(lambda order: st.integers(2, WORLD).map(lambda n: list(order[:n])))
    splits = st.lists(st.tuples(st.integers(12, 60), gangs, st.sampled_from(["zigzag", "contiguous"])), max_size=3)
    whole = st.lists(st.tuples(st.integers(2, 30), st.integers(0, WORLD - 1)), min_size=1, max_size=3)
    minibatches = draw(st.lists(st.builds(Minibatch, splits, whole), min_size=1, max_size=4))
    fault = st.none() | st.builds(Fault, st.integers(0, WORLD - 1), st.integers(0, 2), st.sampled_from(CAUGHT))
    faults = [draw(fault) for _ in minibatches]
    return Job(minibatches, faults, keep=draw(st.booleans()))


def test_random_faults_in_random_minibatches(ranks: Any) -> None:
    pool = ranks(WORLD)

    @given(jobs())
    @settings(max_examples=examples(10))
    def property_(job: Job) -> None:
        lost = pool.run(as_without_them, uuid.uuid4().hex, job, timeout=120.0)
        assert lost == [lost[0]] * WORLD, "every rank gets the same error"

    property_()


FORGOTTEN = "rank 1 ended the minibatch without kv0 of step 1000001; every rank must take all its pieces"


@pytest.mark.parametrize(
    ("fails", "expected", "message"),
    [(False, (OdcError, PeerLostError), FORGOTTEN), (True, (PeerLostError, Boom), "Boom")],
    ids=["forgets its pieces", "fails before them"],
)
def test_a_rank_that_does_not_come_to_its_pieces_is_named(fails: bool, expected: Any, message: str) -> None:
    with spawn_ranks(2, without_its_pieces, uuid.uuid4().hex, fails) as job:
        outcomes = job.wait()
    for outcome, kind in zip(outcomes, expected, strict=True):
        assert outcome.error == kind.__name__ and (message in outcome.message or kind is Boom), outcome.describe()


def without_its_pieces(rank: int, world: int, name: str, fails: bool) -> None:
    """Rank 1 goes through the minibatch as if its plan had no pieces, or ends its block by an error."""
    model = sharded(Job([], []))
    splitter = Splitter(model, LONGEST, timeout_s=300.0, name=name)
    splitter.prepare()
    dist.barrier()  # an error must not reach rank 0 in its preparation
    with model.minibatch():
        if rank == 1 and fails:
            boom()
        for piece in splitter.pieces(Minibatch([(60, [0, 1], "zigzag")]).plan(world)) if rank == 0 else ():
            loss_of(model, *piece.of(tokens_of(0, 60))).backward()
