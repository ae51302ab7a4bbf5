"""A rank that raises, ends early, hangs or is stopped: what its peers are told, and when."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from support.failing import STEPS, WORLD, assert_all_noticed, backward, end, job, until_ended
from support.rank_worker import tell
from support.ranks import spawn_ranks

import odc
from odc import OdcError, Settings
from odc.errors import PeerLostError, WaitTimeoutError

# exceptions ------------------------------------------------------------------------------------------------------


def raise_inside(rank: int, world: int, how: str) -> None:
    model, _ = job(rank, world)
    roots = [model] if how == "minibatch" else [model, job(rank, world)[0]]
    for step in range(3):
        with odc.minibatch(*roots):
            for root in roots:
                backward(root, rank, step)
            if rank == 1 and step == 1:
                tell(time.monotonic())
                raise ValueError("the tokenizer ran out of words")


@pytest.mark.parametrize("how", ["minibatch", "two_roots"])
def test_an_exception_inside_a_minibatch_reaches_every_rank(how: str, nothing_left: list[int]) -> None:
    with spawn_ranks(WORLD, raise_inside, how) as job:
        outcomes = end(job, nothing_left)
    assert (outcomes[1].error, outcomes[1].message) == ("ValueError", "the tokenizer ran out of words")
    assert_all_noticed(outcomes, 1, outcomes[1].told[0])
    for outcome in (outcomes[0], outcomes[2]):
        assert "the tokenizer ran out of words" in outcome.message


def raise_outside(rank: int, world: int) -> None:
    """An unmarked loop: nothing wraps the error, but the rank ends."""
    model, optimizer = job(rank, world)
    for step in range(3):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1 and step == 1:
            tell(time.monotonic())
            raise ValueError("outside of any minibatch")


def test_a_rank_that_ends_with_an_exception_is_missed_by_its_peers(nothing_left: list[int]) -> None:
    with spawn_ranks(WORLD, raise_outside, whole_end=True) as job:
        outcomes = end(job, nothing_left)
    assert outcomes[1].error == "ValueError"
    assert_all_noticed(outcomes, 1, outcomes[1].told[0])
    for outcome in (outcomes[0], outcomes[2]):
        assert "aborted by rank 1: ValueError: outside of any minibatch" in outcome.message


def leave_early(rank: int, world: int) -> None:
    model, _ = job(rank, world)
    for step in range(1 if rank == 2 else 2):
        backward(model, rank, step)
    tell(time.monotonic())


def test_a_rank_that_ends_early_and_in_good_order_is_named(nothing_left: list[int]) -> None:
    with spawn_ranks(WORLD, leave_early, whole_end=True) as job:
        outcomes = end(job, nothing_left)
    assert outcomes[2].exit_code == 0, outcomes[2].describe()
    for outcome in outcomes[:2]:
        assert outcome.error == "PeerLostError", outcome.describe()
        assert "rank 2" in outcome.message


def every_call_raises(rank: int, world: int) -> None:
    """Once aborted, a root stays aborted: whoever swallows the error meets it again."""
    model, _ = job(rank, world)
    backward(model, rank, 0)
    tell("ready")
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
    tell(caught)


def test_an_aborted_root_stays_aborted(nothing_left: list[int]) -> None:
    with spawn_ranks(WORLD, every_call_raises) as job:
        job.until_told(1)  # all are done with the first minibatch
        job.kill(1)
        outcomes = end(job, nothing_left)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.told == ["ready", 4], outcome.describe()
        assert outcome.exit_code == 0, outcome.describe()


# stuck -----------------------------------------------------------------------------------------------------------


def stuck(rank: int, world: int, go_on: Path) -> None:
    model, _ = job(rank, world, settings=Settings(timeout_s=10.0))
    tell(time.monotonic())
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
        assert outcome.at - outcomes[1].told[0] > 10.0, "before the deadline"
    assert outcomes[1].error == "PeerLostError", outcomes[1].describe()  # what it meets when it wakes up


def stopped(rank: int, world: int) -> None:
    model, _ = job(rank, world, settings=Settings(timeout_s=10.0))
    backward(model, rank, 0)
    tell("ready")
    for step in range(1, STEPS):
        backward(model, rank, step)


@pytest.mark.thorough
def test_a_stopped_process_is_named_at_the_deadline(nothing_left: list[int]) -> None:
    """SIGSTOP: its server is stopped as well, but no pidfd says that it is dead."""
    with spawn_ranks(WORLD, stopped) as job:
        job.until_told(1)
        time.sleep(0.2)
        os.kill(job.pids[1], signal.SIGSTOP)
        until_ended(job, (0, 2))
        job.kill(1)
        outcomes = end(job, nothing_left)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error in ("WaitTimeoutError", "PeerLostError"), outcome.describe()
        assert "rank 1" in outcome.message


def slow_but_alive(rank: int, world: int) -> None:
    """Slower than the deadline in total, never between two calls: progress keeps it from being taken for stuck."""
    model, _ = job(rank, world, settings=Settings(timeout_s=10.0))
    with model.minibatch():
        for i in range(5 if rank == 1 else 1):
            if rank == 1:
                time.sleep(2.5)
            backward(model, rank, 0, i)
    tell(time.monotonic())


@pytest.mark.thorough  # tests/runtime/test_wait.py shows it by a clock of its own
def test_a_slow_rank_is_waited_for(nothing_left: list[int]) -> None:
    with spawn_ranks(WORLD, slow_but_alive) as job:
        outcomes = end(job, nothing_left)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 0], outcomes[0].describe()
