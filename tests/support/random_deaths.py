"""Jobs of `support.recovering` in which ranks die at random, each by a seed, so that one that fails can be done again.

    PYTHONPATH=.:tests python -m support.random_deaths --hosts 2 --per-host 2 --kills 50

runs jobs with seeds from `--seed` on until so many ranks have died, and prints those whose weights, moments, random
numbers or place in the data are not those of a job that nothing befell, and those that failed or hung. Hosts are
network namespaces; with one, there are none. With `--delay` each packet between the first host and the others takes up
to so many microseconds longer, another number in each job.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from odc.errors import OdcError
from support.hosts import Hosts
from support.recovering import COMMON, STEPS, Death, Work, run, unequal
from support.recovering_hosts import run_on

IN_A_STEP = ("begin", "forward", "backward", "finish", "clip", "step", "keep")
IN_A_RECOVERY = ("met", "connect", "ready", "restore")
ENDS = ("kill", "segfault", "exit", "raise")
_HUNG_S = 240


class Site(NamedTuple):
    """Where a job runs: `per_host` ranks on each host; None is this machine as it is."""

    hosts: Hosts | None
    per_host: int
    work: Work = COMMON

    @property
    def ranks(self) -> int:
        return self.per_host * (1 if self.hosts is None else len(self.hosts))

    def run(self, folder: Path, deaths: list[Death] = [], killed: Any = None, steps: int = STEPS) -> list[Any]:  # noqa: B006
        """The job. Its launchers have keepers, so that any ranks may die at once."""
        if self.hosts is None:
            return list(run(folder, self.ranks, deaths, steps=steps, restarts=100, killed=killed, work=self.work))
        alike: Any = {"steps": steps, "restarts": 100, "killed": killed, "work": self.work}
        return run_on(self.hosts, self.per_host, folder, deaths, keeper=True, **alike)


def drawn(seed: int, ranks: int, steps: int) -> list[Death]:
    """One to three ranks die in every third step or so, some of them in the recovery from the death before."""
    draw, deaths, step = random.Random(seed), list[Death](), 0
    if draw.random() < 0.3:
        deaths.append(Death(draw.randrange(ranks), 0, "building", draw.choice(ENDS)))
    while step < steps:
        point = draw.choice(IN_A_STEP)
        dying = draw.sample(range(ranks), draw.randint(1, min(3, ranks)))
        deaths += [Death(rank, step, point, draw.choice(ENDS)) for rank in dying]
        if draw.random() < 0.5:
            rank, point = draw.randrange(ranks), draw.choice(IN_A_RECOVERY)
            # A process that takes a place has not come to a step yet: it has done -1, or 0 once it has met the others.
            at = step if rank not in dying else 0 if point == "restore" else -1
            deaths.append(Death(rank, at, point, draw.choice(ENDS)))
        step += draw.randint(1, 4)
    return deaths


def die_at_random(site: Site, folder: Path, seed: int, steps: int = STEPS) -> list[Any]:
    """A job of this seed, and what each rank returned: ranks die at points if it is odd, at any moment if it is even.

    Each death leaves a file in `folder`.
    """
    if seed % 2:
        return site.run(folder, drawn(seed, site.ranks, steps), steps=steps)
    return site.run(folder, killed=(0.25, 10, seed), steps=steps)


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """TimeoutError, on the main thread, if it takes longer."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"has not ended in {seconds} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--per-host", type=int, default=3)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=3 * STEPS)
    parser.add_argument("--seed", type=int, default=0, help="of the first job")
    parser.add_argument("--changes", default=COMMON.changes, help="what hosts read of each other, as in Settings")
    parser.add_argument("--delay", type=int, default=0, help="of the network between hosts, at most: microseconds")
    given = parser.parse_args()
    seed, died, failed = given.seed, 0, list[str]()
    with contextlib.ExitStack() as stack:
        hosts = None if given.hosts == 1 else stack.enter_context(Hosts(given.hosts))
        work = COMMON._replace(changes=given.changes)
        site, folder = Site(hosts, given.per_host, work), Path(stack.enter_context(tempfile.TemporaryDirectory()))
        undisturbed = site.run(folder / "undisturbed", steps=given.steps)
        while died < given.kills:
            here, begun = folder / str(seed), time.monotonic()
            if hosts is not None and given.delay:
                hosts.delay(random.Random(seed).randrange(given.delay))
            try:
                with limited(_HUNG_S):
                    wrong = unequal(die_at_random(site, here, seed, given.steps), undisturbed)
            except (OdcError, TimeoutError) as error:
                wrong = [f"{type(error).__name__}: {error}"]
            count = len(list(here.iterdir()))
            failed += [f"seed {seed}: {one}" for one in wrong]
            died += count
            print(f"seed {seed}: {count} deaths, {time.monotonic() - begun:.0f} s: {wrong or 'equal'}", flush=True)
            seed += 1
    print(f"{seed - given.seed} jobs, {died} deaths, {len(failed)} that failed, hung or are wrong")
    sys.exit("\n".join(failed) if failed else 0)


if __name__ == "__main__":
    main()
