"""A device that computes for long, or is busy (see `support.threaded`): peers and the daemon do not notice."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.busy import FAST, OWNER, PUSHES, Job, busy_job
from support.members import gradients
from support.waiting import until

from odc.fsdp.sender import Sender


@pytest.fixture
def job() -> Iterator[Job]:
    with busy_job() as job:
        yield job


@contextmanager
def sending(job: Job, value: float) -> Iterator[None]:
    """Inside the block the owner's sender has a unit whose gradients are still computed; it is pushed by the end."""
    lanes, group = job.lanes[OWNER], job.group
    sender = Sender(group.members[OWNER].pusher, overlap=True, lanes=lanes)
    try:
        with lanes.shut():
            sender.send(group.units[0], gradients(group.units[0], 2, value))
            until(lambda: "push" in lanes.waiting)
            yield
        sender.flush()
    finally:
        sender.close()


@pytest.mark.parametrize("accumulate", ["server", "direct"])
def test_a_fast_rank_is_not_held_up_by_an_owner_that_computes(accumulate: str) -> None:
    with busy_job(accumulate) as job:
        with sending(job, 1000.0):
            for _ in range(PUSHES):
                job.push()
            until(lambda: job.sum() == {float(PUSHES)})
        assert job.sum() == {1000.0 + PUSHES}


def test_a_daemon_answers_while_the_device_is_busy(job: Job) -> None:
    with job.lanes[OWNER].shut("server"):
        job.push_one()
        for _ in range(3):
            assert job.status()["slots_in_use"] == 1, "no slot is given back before its block is added"
        assert job.added() == 0 and job.sum() == {0.0}
    until(lambda: job.added() == 1)
    assert job.sum() == {1.0} and job.status()["slots_in_use"] == 0


def test_a_death_is_seen_while_the_device_is_busy(job: Job, victim: subprocess.Popen[bytes]) -> None:
    job.servers[OWNER].watch(job.group.services[OWNER], FAST, victim.pid)
    with job.lanes[OWNER].shut("server"):
        job.push_one()
        victim.kill()
        until(lambda: job.status()["state"] == "aborted")


def test_a_block_waits_for_its_own_add_alone(job: Job) -> None:
    """Not for what this rank asks for later in the same lane."""
    lanes = job.lanes[OWNER]
    with lanes.shut("server") as later:
        job.push_one()
        with lanes.shut("server"):
            later.set()
            until(lambda: job.added() == 1)


def test_a_root_is_kept_until_the_device_has_left_it(job: Job) -> None:
    with job.lanes[OWNER].shut("server"):
        job.push_one()
        sums: list[set[float]] = []
        wait = job.dismiss(lambda: sums.append(job.sum()))
        until(lambda: "server" in job.lanes[OWNER].waiting)
        assert sums == []
    wait()
    assert sums == [{1.0}]
