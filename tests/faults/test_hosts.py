"""Faults over hosts that the table has no row for: short ones that the job outlives, and what torchrun prints last."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.failing import STEPS, assert_all_noticed, backward, end, job, until_watched
from support.faults import Fault, train
from support.host_ranks import HostRanks, spawn_on_hosts
from support.hosts import Hosts, need_hosts
from support.models import next_token_loss, tokens
from support.rank_worker import report

from odc import Settings
from odc.fsdp import hooks

WORLD = 4


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    need_hosts()
    with Hosts(2) as hosts:
        yield hosts


def trained(job: HostRanks) -> None:
    """Return once every rank has made two steps, and is in the midst of another."""
    job.until_reported(1)
    time.sleep(0.3)


LOOP = """
import os, signal, torch, torch.distributed as dist
from odc import fully_shard
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
fully_shard(model)
for step in range(1_000_000):
    with model.minibatch():
        model(torch.ones(2, 8)).sum().backward()
    model.zero_grad()
    if dist.get_rank() == 3 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
def test_the_last_message_of_torchrun_names_a_killed_rank_on_every_host(two: Hosts, tmp_path: Path) -> None:
    program = tmp_path / "loop.py"
    program.write_text(LOOP)
    started = two.torchrun(2, str(program))
    printed = [process.communicate(timeout=400)[0] for process in started]
    assert [process.returncode for process in started] == [1, 1], printed
    last = [one.partition("FAILED")[2] for one in printed]
    # Or rank 2, which torchrun ends once it sees that rank 3 died: on a busy machine before the news gets out.
    assert re.search(r"PeerLostError: rank [01] .*: rank [23] died in epoch \d", last[0]), printed[0]
    assert re.search(r"rank +: 3 .*\n.*exitcode +: -9", last[1]), printed[1]


CUT_S = 14.0  # longer than ends links, and engines' reads, by default


def train_through(rank: int, world: int, cut: str, pause: int) -> list[float]:
    """Train 8 steps, from step `pause` on once the file `cut` is there; the sum of each parameter's gradients."""
    torch.manual_seed(0)
    settings = Settings(timeout_s=600.0, lost_after_s=120.0, reproducible=True)
    model, optimizer = job(rank, world, settings=settings)
    found = list[float]()
    for step in range(8):
        if step == pause:
            until_watched(world)
            report("trains")
            while not Path(cut).exists():
                time.sleep(0.01)
        with model.minibatch():
            for i in range((rank + step) % 3):
                backward(model, rank, step, i)
        found += [float(one.grad.to_local().double().sum()) for one in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("pause", [0, 4])
def test_a_job_trains_on_after_a_cut_that_is_shorter_than_lost_after_s(tmp_path: Path, pause: int) -> None:
    """Before the first minibatch there is no link, and ranks watch each other."""
    need_hosts()
    found = []
    with Hosts(2) as hosts:
        for cuts in (True, False):
            file = tmp_path / f"cut {cuts}"
            with spawn_on_hosts(hosts, 2, train_through, str(file), pause) as job:
                trained(job)
                if cuts:
                    hosts.drop(1)
                file.touch()
                if cuts:
                    time.sleep(CUT_S)
                    assert not any(outcome.answered or outcome.failed for outcome in job.outcomes), "it was not cut"
                    hosts.undrop(1)
                outcomes = end(job, [])
            assert not any(outcome.error for outcome in outcomes), [outcome.describe() for outcome in outcomes]
            found.append([outcome.value for outcome in outcomes])
    assert found[0] == found[1], "the cut has changed gradients"


@pytest.mark.thorough
def test_a_host_that_is_stopped_for_a_while_is_waited_for(two: Hosts) -> None:
    with spawn_on_hosts(two, 2, train, Fault("host", "stop", "any", "", hosts=2, world=4), 300) as job:
        trained(job)
        for rank in (2, 3):
            job.signal(rank, signal.SIGSTOP)
        assert not any(outcome.answered for outcome in job.outcomes)
        time.sleep(5.0)
        assert not any(outcome.failed for outcome in job.outcomes)
        for rank in (2, 3):
            job.signal(rank, signal.SIGCONT)
        outcomes = end(job, [])
    assert [outcome.exit_code for outcome in outcomes] == [0] * WORLD, [outcome.describe() for outcome in outcomes]


@pytest.mark.parametrize("culprit", [1, 3])
def test_a_death_is_noticed_where_hosts_have_unequally_many_ranks(two: Hosts, culprit: int) -> None:
    """Ranks 0 to 2 share a host, which is in three parts. Before they are linked, parts do not watch each other."""
    with spawn_on_hosts(two, (3, 1), train, Fault("rank", "kill", "any", "", culprit, world=4), STEPS) as job:
        trained(job)
        died = job.kill(culprit)
        assert_all_noticed(end(job, []), culprit, died)


def claim_on(rank: int, world: int) -> None:
    """Share a queue for ever; its home is rank 0."""
    torch.manual_seed(0)
    model, _ = job(rank, world, settings=Settings(timeout_s=600.0, queue_bytes=1 << 16))
    for step in range(10_000):
        with model.minibatch():
            for microbatch in model.claim([{"x": tokens(rank, step, i)} for i in range(3)]):
                (next_token_loss(model(microbatch["x"]), microbatch["x"]) / 18).backward()
        model.zero_grad()
        if step == 1:
            report("trains")


@pytest.mark.thorough
@pytest.mark.parametrize("culprit", [0, 3])
def test_a_killed_rank_ends_a_queue_on_every_host(two: Hosts, culprit: int) -> None:
    with spawn_on_hosts(two, 2, claim_on) as job:
        trained(job)
        died = job.kill(culprit)
        outcomes = end(job, [])
    assert_all_noticed(outcomes, culprit, died)


def waits_in_a_collective(rank: int, world: int) -> tuple[str, int]:
    """Train a step, then call torch's barrier of another group than the default one; what peers get of its error."""
    model, _ = job(rank, world, settings=Settings(timeout_s=600.0, lost_after_s=4.0))
    with model.minibatch():
        backward(model, rank, 0)
    until_watched(world)
    group = dist.new_group(backend="gloo")
    report("trains")
    try:
        while True:
            dist.barrier(group)
    except RuntimeError as error:
        return hooks._described(error)


@pytest.mark.thorough
def test_a_host_that_is_cut_off_ends_a_collective_of_torch() -> None:
    """As one that has lost its power: no packet ends gloo's wait, which would take half an hour."""
    need_hosts()
    with Hosts(3) as hosts, spawn_on_hosts(hosts, 2, waits_in_a_collective) as job:
        trained(job)
        hosts.drop(2)
        outcomes = end(job, [])
    for outcome in outcomes[:4]:
        assert outcome.value is not None, outcome.describe()
        reason, culprit = outcome.value
        assert reason.startswith(("RuntimeError", "DistBackendError")) and culprit in (4, 5), reason
        assert "cannot be reached any more" in reason


# before any root is linked -----------------------------------------------------------------------------------------


def stay(point: str) -> None:
    """Say that this rank has come so far, and go no further."""
    report(point)
    time.sleep(10_000)


def until_all_begin(job: HostRanks, culprit: int, point: str) -> None:
    points = [point if rank == culprit else "begins" for rank in range(3)]
    job.until(lambda: all(one in job.outcomes[rank].reports for rank, one in enumerate(points)), str(points))


def between_roots(rank: int, world: int) -> None:
    """Train one model; then rank 1 stops, and the others run another."""
    torch.manual_seed(0)
    first, _ = job(rank, world, settings=Settings(timeout_s=600.0))
    until_watched(world)
    with first.minibatch():
        backward(first, rank, 0)
    second, _ = job(rank, world, settings=Settings(timeout_s=600.0))
    if rank == 1:
        stay("between")
    report("begins")
    with second.minibatch():
        backward(second, rank, 0)


@pytest.mark.thorough
def test_a_rank_that_is_killed_between_two_models_is_named() -> None:
    need_hosts()
    with Hosts(3) as three, spawn_on_hosts(three, 1, between_roots) as job:
        until_all_begin(job, 1, "between")
        died = job.kill(1)
        outcomes = end(job, [])
    assert_all_noticed(outcomes, 1, died)


FIRST = """
import os, signal, time, torch, torch.distributed as dist
from odc import fully_shard
from odc.runtime import daemon
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
fully_shard(model)
if dist.get_rank() == 1:
    while not daemon(1)._host_watch.watched():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
with model.minibatch():
    model(torch.ones(2, 8)).sum().backward()
"""


@pytest.mark.thorough
def test_the_last_message_of_torchrun_names_a_rank_that_was_killed_before_its_first_minibatch(tmp_path: Path) -> None:
    need_hosts()
    program = tmp_path / "loop.py"
    program.write_text(FIRST)
    with Hosts(2) as two:
        printed = [process.communicate(timeout=400)[0] for process in two.torchrun(1, str(program))]
    last = [one.partition("FAILED")[2] for one in printed]
    assert re.search(r"PeerLostError: rank 0 .*aborted by rank 1: rank 1 died", last[0]), printed[0]
    assert re.search(r"rank +: 1 .*\n.*exitcode +: -9", last[1]), printed[1]
