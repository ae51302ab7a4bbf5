"""What the survivors of a fault do afterwards, and faults of several ranks, several roots or none at all."""

from __future__ import annotations

import time
from pathlib import Path

from support.failing import NOTICED_S, WORLD, assert_all_noticed, backward, end, job, until_ended
from support.faults import Fault, train
from support.rank_worker import report
from support.ranks import spawn_ranks

import odc
from odc import OdcError, Settings
from odc.errors import PeerLostError, WaitTimeoutError


def raise_inside(rank: int, world: int) -> None:
    roots = [job(rank, world)[0], job(rank, world)[0]]
    for step in range(3):
        with odc.minibatch(*roots):
            for root in roots:
                backward(root, rank, step)
            if rank == 1 and step == 1:
                report(time.monotonic())
                raise ValueError("the tokenizer ran out of words")


def test_an_exception_inside_a_minibatch_of_two_roots_reaches_every_rank(nothing_left: list[int]) -> None:
    with spawn_ranks(WORLD, raise_inside) as job:
        outcomes = end(job, nothing_left)
    assert (outcomes[1].error, outcomes[1].message) == ("ValueError", "the tokenizer ran out of words")
    assert_all_noticed(outcomes, 1, outcomes[1].reports[0])


def every_call_raises(rank: int, world: int) -> None:
    """Once aborted, a root stays aborted: a rank that swallows the error meets it again."""
    model, _ = job(rank, world)
    backward(model, rank, 0)
    report("ready")
    while rank == 1:
        time.sleep(600.0)
    caught = 0
    for _ in range(3):
        try:
            backward(model, rank, 1)
        except PeerLostError as error:
            caught += "rank 1" in str(error)
    try:
        with model.minibatch():
            pass
    except OdcError as error:
        caught += "rank 1" in str(error)
    report(caught)


def test_an_aborted_root_stays_aborted(nothing_left: list[int]) -> None:
    with spawn_ranks(WORLD, every_call_raises) as job:
        job.until_reported(1)  # all are done with the first minibatch
        job.kill(1)
        outcomes = end(job, nothing_left)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.reports == ["ready", 4], outcome.describe()
        assert outcome.exit_code == 0, outcome.describe()


# stuck -----------------------------------------------------------------------------------------------------------


def stuck(rank: int, world: int, go_on: Path) -> None:
    model, _ = job(rank, world, settings=Settings(timeout_s=15.0))
    report(time.monotonic())
    backward(model, rank, 0)
    while rank == 1 and not go_on.exists():
        time.sleep(0.05)
    backward(model, rank, 1)


def test_a_stuck_rank_is_named_at_the_deadline(nothing_left: list[int], tmp_path: Path) -> None:
    with spawn_ranks(WORLD, stuck, tmp_path / "go on") as job:
        until_ended(job, (0, 2))
        (tmp_path / "go on").touch()
        outcomes = end(job, nothing_left)
    waiting = [outcomes[0], outcomes[2]]
    assert WaitTimeoutError.__name__ in {outcome.error for outcome in waiting}, waiting[0].describe()
    for outcome in waiting:
        assert outcome.error in ("WaitTimeoutError", "PeerLostError"), outcome.describe()
        assert "rank 1" in outcome.message
        assert outcome.at - outcomes[1].reports[0] > 10.0, "before the deadline"
    assert outcomes[1].error == "PeerLostError", outcomes[1].describe()  # what it meets when it wakes up


# several -----------------------------------------------------------------------------------------------------------


def compute_then_call(rank: int, world: int, go_on: Path) -> None:
    """Rank 2 computes on its own until rank 1 has learned of rank 0's death, then calls into odc once."""
    model, _ = job(rank, world)
    backward(model, rank, 0)
    report("ready")
    while rank != 1 and not go_on.exists():
        time.sleep(0.05)
    if rank == 2:
        report(time.monotonic())
    backward(model, rank, 1)
    report("a call into odc went through")


def test_a_computing_rank_learns_of_it_at_its_next_call(nothing_left: list[int], tmp_path: Path) -> None:
    with spawn_ranks(WORLD, compute_then_call, tmp_path / "go on") as job:
        job.until_reported(1)  # a rank that is still at the end of its minibatch would learn of it there
        died = job.kill(0)
        until_ended(job, (0, 1))
        (tmp_path / "go on").touch()
        outcomes = end(job, nothing_left)
    called = outcomes[2].reports[1]
    assert_all_noticed(outcomes[:2], 0, died)
    assert_all_noticed(outcomes[2:], 0, called)
    assert outcomes[2].reports == ["ready", called]


def test_all_but_one_killed_at_once(nothing_left: list[int]) -> None:
    with spawn_ranks(WORLD, train, Fault("rank", "kill", "any", "rank {} died")) as job:
        job.until_reported(1)
        time.sleep(0.3)
        died = [job.kill(rank) for rank in (0, 2)]
        outcomes = end(job, nothing_left)
    survivor = outcomes[1]
    assert survivor.error == "PeerLostError", survivor.describe()
    assert "rank 0" in survivor.message or "rank 2" in survivor.message
    assert survivor.at - died[0] < NOTICED_S


def test_a_job_that_ends_in_good_order_leaves_nothing(nothing_left: list[int]) -> None:
    with spawn_ranks(WORLD, train, Fault("rank", "kill", "any", ""), 3, whole_end=True) as job:
        outcomes = end(job, nothing_left)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 0], [outcome.describe() for outcome in outcomes]
