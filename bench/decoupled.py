"""Whether a rank on a device waits for another's compute, *emulated*: lanes are threads, compute is sleep.

Run as `OMP_NUM_THREADS=1 python -m bench.decoupled --results bench/results`.

Two members in one process push to each other, each with a sender and a daemon, as on a device. "beside a busy owner": a
fast one computes and pushes 84 units while its owner computes units of `--owner-ms`; "beside an idle owner": while that
computes nothing. Both run in each round, in turns. "times_idle" is the median over rounds of the first's time over the
second's; "least_times_idle" the ratio of their shortest times.

"status" is how long the owner's daemon takes to answer `odc status` while its device adds nothing for `--busy-s`, with
a block of the other to be added.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.script import Script
from odc.fsdp.sender import Sender

sys.path[:0] = [str(Path(__file__).parent.parent / "tests")]  # the members and lanes are those of the tests

if TYPE_CHECKING:
    from support.busy import Job

BUSY, IDLE = "beside a busy owner", "beside an idle owner"


class Backward:
    """One member's backward: units of so many seconds on its device, each pushed by its sender."""

    def __init__(self, job: Job, member: int, unit_s: float) -> None:
        from support.members import gradients

        self._lanes, self._unit_s, self._unit = job.lanes[member], unit_s, job.group.units[0]
        self._gradients = gradients(self._unit, 2)
        self._sender = Sender(job.group.members[member].pusher, overlap=True, lanes=self._lanes)

    def unit(self) -> None:
        """As the training thread does it, which is ahead of its device."""
        self._lanes.ask(lambda: time.sleep(self._unit_s))
        self._sender.send(self._unit, self._gradients)

    def end(self) -> None:
        """Return when everything is posted."""
        self._sender.flush()
        self._sender.close()


@contextlib.contextmanager
def computing(job: Job, unit_s: float) -> Iterator[None]:
    """Inside the block the owner is in backward."""
    from support.busy import OWNER
    from support.waiting import until

    backward, over = Backward(job, OWNER, unit_s), threading.Event()

    def run() -> None:
        while not over.is_set():
            backward.unit()

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: "push" in job.lanes[OWNER].waiting)
    try:
        yield
    finally:
        over.set()
        thread.join()
        backward.end()


def push_all(unit_s: float, owner_s: float) -> float:
    """Seconds in which a member computes 84 units, and all are added at their owner; of a unit there `owner_s`."""
    from support.busy import FAST, PUSHES, busy_job
    from support.waiting import until

    with busy_job() as job, computing(job, owner_s) if owner_s else contextlib.nullcontext():
        backward, begin = Backward(job, FAST, unit_s), time.perf_counter()
        for _ in range(PUSHES):
            backward.unit()
        backward.end()
        until(lambda: job.added() == PUSHES)
        return time.perf_counter() - begin


def answers(busy_s: float) -> list[float]:
    """Seconds of each answer to `odc status` while the owner's device is busy."""
    from support.busy import OWNER, busy_job

    found = []
    with busy_job() as job, job.lanes[OWNER].shut("server") as over:
        job.push_one()
        threading.Timer(busy_s, over.set).start()
        while not over.is_set():
            begin = time.perf_counter()
            job.status()
            found.append(time.perf_counter() - begin)
            time.sleep(0.01)
    return found


def main() -> None:
    script = Script(
        __doc__,
        rounds=(5, "of each way"),
        fast_ms=(10, "of a unit of the fast member"),
        owner_ms=(300, "of a unit of its busy owner"),
        busy_s=(5, "for which a device is busy while its daemon is asked"),
    )
    given = script.given
    times: dict[str, list[float]] = {IDLE: [], BUSY: []}
    for _ in range(given.rounds):
        for name, owner_ms in ((IDLE, 0), (BUSY, given.owner_ms)):
            times[name].append(push_all(given.fast_ms / 1e3, owner_ms / 1e3))
    rows = [
        {
            "what": f"84 pushes, {name}",
            "median_ms": median(taken) * 1e3,
            "least_ms": min(taken) * 1e3,
            "times_idle": median(mine / idle for mine, idle in zip(taken, times[IDLE], strict=True)),
            "least_times_idle": min(taken) / min(times[IDLE]),
        }
        for name, taken in times.items()
    ]
    waits = answers(given.busy_s)
    rows.append(
        {"what": "status beside a busy device", "median_ms": median(waits) * 1e3, "longest_ms": max(waits) * 1e3}
    )
    script.store("decoupled", "A fast rank beside a busy owner, and its daemon beside a busy device (emulated)", rows)


if __name__ == "__main__":
    main()
