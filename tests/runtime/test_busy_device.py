"""Members on a device that computes for long (see `support.threaded`): their peers and their daemon do not notice."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from support.members import HeapGroup, gradients
from support.sides import ONE_UNIT
from support.threaded import DEADLINE_S, ThreadedLanes, threaded_heaps
from support.waiting import until

from odc.fsdp.sender import Sender
from odc.net.requests import ask
from odc.runtime import Daemon
from odc.settings import Settings

OWNER, FAST = 0, 1
PUSHES = 84  # of 28 units in three microbatches


@dataclass
class Job:
    """Two members, of which the owner has a daemon."""

    group: HeapGroup
    lanes: list[ThreadedLanes]
    server: Daemon

    def sum(self) -> set[float]:
        return set(self.group.layouts[OWNER].mine.accumulator(self.group.units[0]).tolist())

    def added(self) -> int:
        return self.group.layouts[OWNER].mine.accumulated.load(FAST)

    def push(self) -> None:
        with self.lanes[FAST].lane("push"):
            self.group.push(FAST, 1.0)

    def push_one(self) -> None:
        """Return when the owner's daemon has asked its device to add the block, and for a mark."""
        asked = self.lanes[OWNER].asked
        before = asked["server"]
        self.push()
        until(lambda: asked["server"] >= before + 2)

    def status(self) -> dict[str, Any]:
        root: dict[str, Any] = ask(self.server.address, {"op": "status"}, DEADLINE_S / 2).reply["roots"][0]
        return root


class ServedGroup(HeapGroup):
    """A group whose pushers notify the owner's daemon; what is pushed to the other member stays in its slots."""

    def __init__(self, server: Daemon, *args: Any, **options: Any) -> None:
        self.server = server
        super().__init__(*args, **options)

    def notify(self, member: int) -> None:
        if member == OWNER:
            self.server.notify()


@contextmanager
def jobs(server: Daemon, accumulate: str = "server") -> Iterator[Job]:
    settings = Settings(timeout_s=DEADLINE_S / 2, accumulate=accumulate)
    with threaded_heaps() as lanes, ServedGroup(server, ONE_UNIT, 2, settings=settings) as group:
        group.attach()
        group.publish_all()
        server.serve(group.services[OWNER])
        yield Job(group, lanes, server)
        server.dismiss(group.services[OWNER])()


@pytest.fixture
def job(server: Daemon) -> Iterator[Job]:
    with jobs(server) as job:
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
def test_a_fast_rank_is_not_held_up_by_an_owner_that_computes(server: Daemon, accumulate: str) -> None:
    with jobs(server, accumulate) as job:
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
    job.server.watch(job.group.services[OWNER], FAST, victim.pid)
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
        wait = job.server.dismiss(job.group.services[OWNER], lambda: sums.append(job.sum()))
        until(lambda: "server" in job.lanes[OWNER].waiting)
        assert sums == []
    wait()
    assert sums == [{1.0}]
