"""How long after `kill -9` of one rank every other rank has raised.

Run as `OMP_NUM_THREADS=1 python -m bench.deaths --results bench/results`, as root for ranks on several hosts, which are
network namespaces. Everything is *measured*: the job of the table of faults (tests/faults/test_faults.py) trains a
small model with unequal counts. On one host a rank kills itself in its third step, in turn at every one of MOMENTS; on
two hosts each rank in turn is killed from outside, at whatever it does. In the last row the process that hosts the
job's store is killed before the first minibatch, of jobs started in four ways (tests/faults/test_store_host.py).
The time runs from just before the signal until the error has left the loop of the last rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.script import Script

_TESTS = Path(__file__).parent.parent / "tests"
MOMENTS: Any = ("forward", "backward", "push", "finish", "step", "evaluation", "between_minibatches", "connect")
sys.path[:0] = [str(_TESTS), str(_TESTS / "faults")]  # the jobs are those of the tests


def noticed(outcomes: list[Any], culprit: int, died: float) -> float:
    """Seconds until the last survivor had raised; all have to name the rank that died."""
    from support.failing import assert_all_noticed

    assert_all_noticed(outcomes, culprit, died)
    return max(outcome.at for outcome in outcomes if outcome.rank != culprit) - died


def on_one_host(world: int, repeats: int) -> list[tuple[float, str]]:
    """Seconds, and what the killed rank did."""
    from support.faults import Fault, train
    from support.ranks import spawn_ranks

    found = []
    for number, moment in enumerate(MOMENTS * repeats):
        culprit = number % world
        with spawn_ranks(world, train, Fault("rank", "kill", moment, "", culprit, world)) as job:
            outcomes = job.wait()
        found.append((noticed(outcomes, culprit, outcomes[culprit].reports[-1][0]), moment))
    return found


def on_two_hosts(repeats: int) -> list[tuple[float, str]]:
    """Seconds, and the rank that was killed, of 2 on each of two hosts."""
    from support.faults import Fault, train
    from support.host_ranks import spawn_on_hosts
    from support.hosts import Hosts

    found = []
    with Hosts(2) as hosts:
        for number in range(4 * repeats):
            culprit = number % 4
            with spawn_on_hosts(hosts, 2, train, Fault("rank", "kill", "any", "", culprit, 4, hosts=2)) as job:
                while any(not outcome.reports for outcome in job.outcomes):
                    job.receive(0.05)
                time.sleep(0.3)  # it is in the midst of a step
                died = job.kill(culprit)
                outcomes = job.wait()
            found.append((noticed(outcomes, culprit, died), f"rank {culprit}"))
    return found


def before_the_first_minibatch(repeats: int) -> list[tuple[float, str]]:
    """Seconds, and how the job was started, of three ranks whose store's host ends; of a file, rank 0."""
    from test_store_host import WORLD, Started

    found = []
    for start in ("env", "spawn", "torchrun", "file") * repeats:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
            job = Started(Path(folder), start, "killed", opened)
            for rank in range(WORLD):
                job.text(f"ready{rank}")
            died = time.time()
            os.kill(job.processes[0].pid if start == "torchrun" else int(job.text("pid0")), signal.SIGKILL)
            (job.folder / "go").write_text("go")
            for rank in range(1, WORLD):
                if not job.text(f"error{rank}").startswith("PeerLostError: "):
                    raise SystemExit(job.outputs())
            last = max((job.folder / f"error{rank}").stat().st_mtime for rank in range(1, WORLD))
        found.append((last - died, start))
    return found


def row_of(ranks: str, found: list[tuple[float, str]]) -> dict[str, Any]:
    """One line of the table."""
    seconds = [took for took, _ in found]
    print(f"{ranks}: {found}", file=sys.stderr, flush=True)
    return {
        "ranks": ranks,
        "kills": len(seconds),
        "median_s": median(seconds),
        "most_s": max(seconds),
        "slowest at": max(found)[1],
    }


def main() -> None:
    script = Script(__doc__, repeats=(2, "kills of each kind"))
    repeats = script.given.repeats
    rows = [row_of(str(world), on_one_host(world, repeats)) for world in (2, 3, 4)]
    rows.append(row_of("2 x 2 on two hosts", on_two_hosts(repeats)))
    rows.append(row_of("3, the store's host before the first minibatch", before_the_first_minibatch(repeats)))
    script.store("deaths", "Seconds from `kill -9` of a rank until every other rank has raised, naming it", rows)


if __name__ == "__main__":
    main()
