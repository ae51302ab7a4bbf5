"""Hundreds of random minibatches at random paces, in jobs that end well, by a rank's death, or in opposite orders."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.failing import assert_all_noticed
from support.rank_worker import die
from support.ranks import spawn_ranks
from support.split_jobs import LONGEST, Minibatch, add_whole, gradient_error, model_of, step_of

from odc.errors import OdcError, WaitTimeoutError
from odc.split import Splitter

WORLD, EACH = 3, 25  # ranks; minibatches of a job


@dataclass(frozen=True)
class Job:
    """`EACH` minibatches that are drawn from `seed`, and how the last one ends.

    With "orders" each rank runs its split samples in an order of its own; with "forward" and "backward" `culprit` dies
    in a layer of a piece that all ranks have.
    """

    seed: int
    keep: bool
    end: Literal["well", "orders", "forward", "backward"]
    culprit: int
    layer: int

    def minibatches(self) -> list[Minibatch]:
        draw = random.Random(self.seed)
        return [self._one(draw) for _ in range(EACH)]

    def _one(self, draw: random.Random) -> Minibatch:
        cuts = ["zigzag", "contiguous", "uneven"]
        splits = [
            (draw.randint(12, 80), draw.sample(range(WORLD), draw.randint(2, WORLD)), draw.choice(cuts))
            for _ in range(draw.randint(0, 4))
        ]
        whole = [(draw.randint(2, 40), draw.randrange(WORLD)) for _ in range(draw.randint(1, 4))]
        return Minibatch(splits, whole)

    def last(self, rank: int) -> Minibatch:
        """What a rank makes of the last minibatch."""
        last = self.minibatches()[-1]
        if self.end == "orders":
            random.Random(f"{self.seed} {rank}").shuffle(last.splits)
        if self.end in ("forward", "backward"):
            last.splits.append((50, [2, 0, 1], "zigzag"))
        return last

    def orders_differ(self) -> bool:
        """Whether a rank comes to another split sample than a rank with a piece of it."""
        plans = [self.last(rank).plan(WORLD).splits for rank in range(WORLD)]
        for places in zip(*plans, strict=True):
            for rank, mine in enumerate(places):
                if rank in mine.ranks and any(places[other] != mine for other in mine.ranks):
                    return True
        return False


JOBS = st.builds(
    Job,
    st.integers(0, 1 << 30),
    st.booleans(),
    st.sampled_from(["well", "orders", "forward", "backward"]),
    st.integers(0, WORLD - 1),
    st.integers(0, 1),
)


def run_job(rank: int, world: int, name: str, job: Job) -> str:
    """Returns the error about opposite orders, after comparing gradients of all minibatches before."""
    model, like = model_of("own", torch.float64), model_of("own", torch.float64)
    splitter = Splitter(model, LONGEST, layers=2, keep=job.keep, timeout_s=600.0, name=name)
    splitter.prepare()
    random.seed(f"{job.seed} {rank}")
    before = job.minibatches()[:-1]
    for minibatch in before:  # no rank waits for all others in between
        step_of(model, splitter, minibatch, rank, world, random.choice([0.0, 0.0, 0.002]))
    for minibatch in before:
        add_whole(like, minibatch)
    error = gradient_error(model, like)
    assert error <= 1e-12, f"gradients of {job} are apart by {error}"
    return end_of(rank, world, job, model, splitter)


def end_of(rank: int, world: int, job: Job, model: Any, splitter: Splitter) -> str:
    # In backward above the first layer: there its peers still wait for gradients of the layer below.
    doomed, layer = rank == job.culprit, model.qkv[1 if job.end == "backward" else job.layer]
    if doomed and job.end == "forward":
        layer.register_forward_pre_hook(lambda *_: die(rank))
    if doomed and job.end == "backward":
        layer.register_full_backward_hook(lambda *_: die(rank))
    try:
        step_of(model, splitter, job.last(rank), rank, world, 0.002)
    except WaitTimeoutError:
        raise
    except OdcError as error:
        if job.end != "orders":
            raise
        return str(error)
    splitter.close()
    return ""


@pytest.mark.thorough
def test_hundreds_of_random_minibatches_end_as_they_must() -> None:
    """Gradients are exact; ranks that wait for the dead one name it; opposite orders are an error; no rank hangs."""

    @given(JOBS)
    @settings(max_examples=examples(15))
    def property_(job: Job) -> None:
        with spawn_ranks(WORLD, run_job, uuid.uuid4().hex, job) as ranks:
            outcomes = ranks.wait()
        if job.end in ("forward", "backward"):
            ((died, culprit),) = [report for outcome in outcomes for report in outcome.reports]
            assert culprit == job.culprit
            assert_all_noticed(outcomes, culprit, died)
            return
        assert [outcome.error for outcome in outcomes] == [None] * WORLD, "\n".join(o.describe() for o in outcomes)
        errors = [outcome.value for outcome in outcomes]
        assert any(errors) == (job.end == "orders" and job.orders_differ()), errors

    property_()
