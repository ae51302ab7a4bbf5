"""Ranks alone on their hosts, one of which ends before any root is linked: the others learn it at once, and of whom."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.failing import NOTICED_S, assert_all_noticed, backward, end, job, until_ended, until_watched
from support.host_ranks import HostRanks, spawn_on_hosts
from support.hosts import Hosts, need_hosts
from support.rank_worker import tell

from odc import Settings
from odc.fsdp.root import Root
from odc.net.network import HostNetwork
from odc.runtime import Member

PATIENT = Settings(timeout_s=600.0)


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    need_hosts()
    with Hosts(3) as hosts:
        yield hosts


def stay(point: str) -> None:
    """Say that this rank has come so far, and go no further."""
    tell(point)
    time.sleep(10_000)


def stopped_at(rank: int, world: int, culprit: int, point: str) -> None:
    """Run a minibatch, or stop at `point` to be killed there, as the culprit."""
    mine, patch = rank == culprit, pytest.MonkeyPatch()  # of a process that ends here
    torch.manual_seed(0)
    model, _ = job(rank, world, settings=PATIENT)
    until_watched(world)
    if mine and point == "sharded":
        stay(point)
    if mine and point == "located":
        patch.setattr(Member, "__init__", lambda *unused: stay(point))
    if mine and point == "not announced":
        patch.setattr(Member, "announce", lambda *unused: stay(point))
    if point == "not linked":  # it is announced, and nobody has connected for its links
        dial = HostNetwork.dial

        def cut(self: HostNetwork, to: int, *rest: Any) -> Any:
            return time.sleep(10_000) if culprit in (rank, to) else dial(self, to, *rest)

        patch.setattr(HostNetwork, "dial", cut)
        if mine:
            patch.setattr(Root, "before_forward", lambda *unused: stay(point))
    tell("begins")
    with model.minibatch():
        backward(model, rank, 0)


def until_told(job: HostRanks, rank: int, point: str) -> None:
    while point not in job.outcomes[rank].told:
        assert not job.outcomes[rank].failed, job.outcomes[rank].describe()
        job.receive(0.05)


def until_all_begin(job: HostRanks, culprit: int, point: str) -> None:
    for rank in range(3):
        until_told(job, rank, point if rank == culprit else "begins")


@pytest.mark.parametrize(
    ("culprit", "point"),
    [
        (2, "sharded"),
        *(
            pytest.param(culprit, point, marks=pytest.mark.thorough)
            for culprit, point in ((0, "located"), (1, "not announced"), (2, "not linked"), (0, "not linked"))
        ),
    ],
)
def test_a_rank_that_is_killed_before_it_is_linked_is_named(three: Hosts, culprit: int, point: str) -> None:
    with spawn_on_hosts(three, 1, stopped_at, culprit, point) as job:
        until_all_begin(job, culprit, point)
        died = job.kill(culprit)
        outcomes = end(job, [])
    assert_all_noticed(outcomes, culprit, died)
    latest = max(outcome.at for outcome in outcomes if outcome.rank != culprit)
    print(f"rank {culprit}, {point}, was named by every rank within {latest - died:.3f} s")


@pytest.mark.thorough
def test_a_host_that_vanishes_before_it_is_linked_is_noticed() -> None:
    need_hosts()
    with Hosts(3) as hosts, spawn_on_hosts(hosts, 1, stopped_at, 2, "sharded") as job:
        until_all_begin(job, 2, "sharded")
        cut = time.monotonic()
        hosts.drop(2)
        until_ended(job, (0, 1))
        for outcome in job.outcomes[:2]:
            assert outcome.error == "PeerLostError", outcome.describe()
            assert "rank 2 cannot be reached any more" in outcome.message, outcome.message
            assert outcome.at - cut < NOTICED_S
        print(f"the cut was named within {max(one.at for one in job.outcomes[:2]) - cut:.3f} s")


def between_roots(rank: int, world: int) -> None:
    """Train one model; then rank 1 stops, and the others run another."""
    torch.manual_seed(0)
    first, _ = job(rank, world, settings=PATIENT)
    until_watched(world)
    with first.minibatch():
        backward(first, rank, 0)
    second, _ = job(rank, world, settings=PATIENT)
    if rank == 1:
        stay("between")
    tell("begins")
    with second.minibatch():
        backward(second, rank, 0)


@pytest.mark.thorough
def test_a_rank_that_is_killed_between_two_models_is_named(three: Hosts) -> None:
    with spawn_on_hosts(three, 1, between_roots) as job:
        until_all_begin(job, 1, "between")
        died = job.kill(1)
        outcomes = end(job, [])
    assert_all_noticed(outcomes, 1, died)


def fail_before_the_first(rank: int, world: int) -> None:
    model, _ = job(rank, world, settings=PATIENT)
    if rank == 2:
        until_watched(world)  # the others may see it no sooner than as it ends
        raise ValueError("no such file")
    with model.minibatch():
        backward(model, rank, 0)


def test_an_error_before_the_first_minibatch_is_told_with_its_reason(three: Hosts) -> None:
    with spawn_on_hosts(three, 1, fail_before_the_first) as job:
        outcomes = end(job, [])
    assert outcomes[2].error == "ValueError"
    for outcome in outcomes[:2]:
        assert outcome.error == "PeerLostError", outcome.describe()
        assert "aborted by rank 2: ValueError: no such file" in outcome.message


LOOP = """
import os, signal, time, torch, torch.distributed as dist
from odc import fully_shard
from odc.runtime import daemon
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
fully_shard(model)
if dist.get_rank() == 1:
    while not daemon(1)._watch_over_hosts.watched():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
with model.minibatch():
    model(torch.ones(2, 8)).sum().backward()
"""


@pytest.mark.thorough
def test_the_last_message_of_torchrun_names_a_rank_that_was_killed_before_its_first_minibatch(tmp_path: Path) -> None:
    need_hosts()
    program = tmp_path / "loop.py"
    program.write_text(LOOP)
    with Hosts(2) as two:
        said = [process.communicate(timeout=400)[0] for process in two.torchrun(1, str(program))]
    last = [one.partition("FAILED")[2] for one in said]
    assert re.search(r"PeerLostError: rank 0 .*aborted by rank 1: rank 1 died", last[0]), said[0]
    assert re.search(r"rank +: 1 .*\n.*exitcode +: -9", last[1]), said[1]
