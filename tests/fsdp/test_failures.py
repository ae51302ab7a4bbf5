"""A rank that is killed: every other rank learns of it in time, by name, and nothing is left behind.

Each test has its own ranks.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.failing import NOTICED_S, STEPS, WORLD, assert_all_noticed, backward, end, job, until_ended
from support.models import Case, build, next_token_loss, tokens
from support.rank_worker import die, tell
from support.ranks import spawn_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

from odc import Settings, fully_shard
from odc.protocol.push import Pusher


def train_until_the_end(rank: int, world: int, at: str = "", culprit: int = -1, steps: int = STEPS) -> None:
    """Train with unequal counts; `culprit` dies in its third step at the point named `at`."""
    torch.manual_seed(0)
    model, optimizer = job(rank, world)
    if at == "before_first_forward" and rank == culprit:
        die()
    now = {"step": 0}

    def die_at(point: str) -> None:
        if rank == culprit and now["step"] == 2 and at == point:
            die()

    model.layers[1].register_forward_pre_hook(lambda *unused: die_at("forward"))
    model.layers[1].register_full_backward_pre_hook(lambda *unused: die_at("backward"))
    push_to = Pusher.push_to

    def watched(self: Pusher, owner: int, *args: Any) -> int:
        sent = push_to(self, owner, *args)
        die_at("between_pushes")
        return sent

    Pusher.push_to = watched  # type: ignore[method-assign]
    optimizer.register_step_pre_hook(lambda *unused: die_at("optimizer_step"))
    tell("ready")
    for step in range(steps):
        now["step"] = step
        die_at("between_minibatches")
        with model.minibatch():
            for i in range((rank + step) % 3):
                backward(model, rank, step, i)
            if rank == culprit and (rank + step) % 3 == 0:
                backward(model, rank, step)  # it has at least one microbatch to die in
            die_at("before_finish")
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(tokens(rank, step, 7))
            die_at("evaluation")


# kill -9 ---------------------------------------------------------------------------------------------------------

POINTS = (
    "before_first_forward", "forward", "backward", "between_pushes", "before_finish", "optimizer_step", "evaluation",
    "between_minibatches",
)  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
def test_killed_at(point: str, nothing_left: list[int]) -> None:
    culprit = POINTS.index(point) % WORLD
    with spawn_ranks(WORLD, train_until_the_end, point, culprit) as job:
        outcomes = end(job, nothing_left)
    assert outcomes[culprit].exit_code == -9, outcomes[culprit].describe()
    assert_all_noticed(outcomes, culprit, outcomes[culprit].told[-1][0])


def train_replicas(rank: int, world: int) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = build(fully_shard, Case(counts=((1, 1, 1, 1),)), grid)
    tell("ready")
    for step in range(STEPS):
        backward(model, rank, step)
        model.zero_grad()


@pytest.mark.parametrize("culprit", [0, pytest.param(3, marks=pytest.mark.thorough)])
def test_killed_among_replicas(culprit: int, nothing_left: list[int]) -> None:
    """Ranks on the diagonal of the mesh share neither a shard group nor a replica group, and still learn of it."""
    with spawn_ranks(4, train_replicas) as job:
        job.until_told(1)
        time.sleep(0.4)
        died = job.kill(culprit)
        outcomes = end(job, nothing_left)
    assert_all_noticed(outcomes, culprit, died)


@pytest.mark.parametrize(
    "culprit", [pytest.param(0, marks=pytest.mark.thorough), 1, pytest.param(2, marks=pytest.mark.thorough)]
)
def test_killed_from_outside_at_a_random_time(culprit: int, nothing_left: list[int]) -> None:
    wait_s = random.SystemRandom().uniform(0.0, 0.7)
    with spawn_ranks(WORLD, train_until_the_end) as job:
        job.until_told(1)
        time.sleep(wait_s)
        died = job.kill(culprit)
        outcomes = end(job, nothing_left)
    print(f"killed rank {culprit} {wait_s:.3f} s after the start")
    assert_all_noticed(outcomes, culprit, died)


def test_all_but_one_killed_at_once(nothing_left: list[int]) -> None:
    with spawn_ranks(WORLD, train_until_the_end) as job:
        job.until_told(1)
        time.sleep(0.3)
        died = [job.kill(rank) for rank in (0, 2)]
        outcomes = end(job, nothing_left)
    survivor = outcomes[1]
    assert survivor.error == "PeerLostError", survivor.describe()
    assert "rank 0" in survivor.message or "rank 2" in survivor.message
    assert survivor.at - died[0] < NOTICED_S


def compute_then_call(rank: int, world: int, go_on: Path) -> None:
    """Rank 2 computes on its own until rank 1 has learned of rank 0's death, then calls into odc once."""
    model, _ = job(rank, world)
    backward(model, rank, 0)
    tell("ready")
    while rank != 1 and not go_on.exists():
        time.sleep(0.05)
    if rank == 2:
        tell(time.monotonic())
    backward(model, rank, 1)
    tell("a call into odc went through")


def test_a_computing_rank_learns_of_it_at_its_next_call(nothing_left: list[int], tmp_path: Path) -> None:
    with spawn_ranks(WORLD, compute_then_call, tmp_path / "go on") as job:
        job.until_told(1)  # a rank that is still at the end of its minibatch would learn of it there
        died = job.kill(0)
        until_ended(job, (0, 1))
        (tmp_path / "go on").touch()
        outcomes = end(job, nothing_left)
    called = outcomes[2].told[1]
    assert_all_noticed(outcomes[:2], 0, died)
    assert_all_noticed(outcomes[2:], 0, called)
    assert outcomes[2].told == ["ready", called]


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, i: int) -> torch.Tensor:
        return tokens(self.rank, i, 0)[0]


def train_with_loader(rank: int, world: int, start: str) -> None:
    """Loader workers are forked from a rank that has heaps open, or before it has any."""
    loader = DataLoader(Numbers(rank), batch_size=2, num_workers=2, persistent_workers=True)
    batches = iter(loader) if start == "before" else None
    model, optimizer = job(rank, world)
    backward(model, rank, 0)
    model.zero_grad()
    for step, x in enumerate(batches if batches is not None else loader):
        (next_token_loss(model(x), x) / 18).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            tell("ready")
            if rank == 1:
                die()


@pytest.mark.parametrize("start", [pytest.param("before", marks=pytest.mark.thorough), "after"])
def test_killed_while_loader_workers_live(start: str, nothing_left: list[int]) -> None:
    with spawn_ranks(WORLD, train_with_loader, start) as job:
        outcomes = end(job, nothing_left)
    assert_all_noticed(outcomes, 1, outcomes[1].told[-1][0])


@pytest.mark.thorough
def test_killed_before_it_has_a_heap_is_named_at_the_deadline(nothing_left: list[int]) -> None:
    with spawn_ranks(WORLD, never_comes_up, 1) as job:
        outcomes = end(job, nothing_left)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error in ("WaitTimeoutError", "PeerLostError"), outcome.describe()
        assert "rank 1" in outcome.message
        assert outcome.at - outcomes[1].told[-1][0] < 10.0 + NOTICED_S


def never_comes_up(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        die()
    model, _ = job(rank, world, settings=Settings(timeout_s=10.0))
    backward(model, rank, 0)


def orderly(rank: int, world: int) -> None:
    train_until_the_end(rank, world, steps=3)


def test_a_job_that_ends_in_good_order_leaves_nothing(nothing_left: list[int]) -> None:
    with spawn_ranks(WORLD, orderly, whole_end=True) as job:
        outcomes = end(job, nothing_left)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 0], [outcome.describe() for outcome in outcomes]
