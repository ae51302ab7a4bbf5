"""Where the daemon adds: a thread in the rank, or a process beside it.

Run as `OMP_NUM_THREADS=1 python -m bench.server_homes --results bench/results`. One rank pushes a chunk again and again
to an owner whose main thread sleeps, multiplies matrices, runs pure Python, or compiles Python source (as an import
does; one call that never lets go of the GIL). Measured: throughput of the pushes until added, the owner's own pace
against its pace without pushes, and what each home costs to start and to keep.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench import _homes
from bench.bench_push import Push
from odc.bench.crew import Crew, held
from odc.bench.report import store
from odc.bench.units import MIB, build
from odc.provenance import begin

OWNER = 1


def _matmul() -> Callable[[], Any]:
    left, right = torch.randn(512, 512), torch.randn(512, 512)
    return lambda: left @ right


def _python() -> Callable[[], Any]:
    return lambda: sum(i * i for i in range(2000))


def _compile() -> Callable[[], Any]:
    import _pydecimal

    source = Path(_pydecimal.__file__).read_text()
    return lambda: compile(source, "decimal", "exec")


STATES: dict[str, Callable[[], Callable[[], Any]]] = {
    "sleeps": lambda: lambda: time.sleep(0.05),
    "multiplies matrices": _matmul,
    "runs pure Python": _python,
    "compiles Python": _compile,
}


def build_and_open(mib: int) -> None:
    """A unit of two chunks of `mib` MiB, open."""
    build("odc", 2 * mib * MIB, torch.float32)
    held.module.unshard()
    held.module.reshard()


def occupy(state: str, seconds: float) -> float:
    """Keep the main thread at it; how often a second it got around."""
    work = STATES[state]()
    begin, rounds = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        work()
        rounds += 1
    return rounds / (time.perf_counter() - begin)


def pushed(crew: Crew, push: Push, state: str, seconds: float) -> tuple[float, float]:
    """(GB/s accumulated, owner's rounds a second) while the owner is in `state`."""
    crew.start(occupy, state, seconds + 0.5)
    time.sleep(0.25)
    begin, times = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        push()
        times += 1
    rate = times * push.unit.numel * 4 / (time.perf_counter() - begin) / 1e9
    return rate, crew.finish()[0]


def measure(mib: int, seconds: float, repeats: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows of throughput, rows of cost of each home)."""
    rates: dict[tuple[str, str], list[float]] = {}
    paces: dict[tuple[str, str], list[float]] = {}
    with Crew(2) as crew:
        (thread,) = crew.others(_homes.start_thread, OWNER)
        crew.each(build_and_open, mib)
        push = Push(torch.float32)
        costs = [{"home": "thread", **thread}]
        for repeat in range(repeats):
            for state in STATES:
                paces.setdefault((state, "no pushes"), []).extend(crew.others(occupy, state, seconds / 2))
            for home in ("thread", "process"):
                if home == "process":
                    (beside,) = crew.others(_homes.move_out, OWNER)
                    costs += [{"home": "process", **beside}] if not repeat else []
                for state in STATES:
                    rate, pace = pushed(crew, push, state, seconds)
                    rates.setdefault((state, home), []).append(rate)
                    paces.setdefault((state, home), []).append(pace)
                if home == "process":
                    crew.others(_homes.move_in, OWNER)
            print(f"repeat {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
    rows = []
    for state in STATES:
        alone = median(paces[state, "no pushes"])
        row: dict[str, Any] = {"owner's main thread": state}
        for home in ("thread", "process"):
            row[f"{home}_GBps"] = median(rates[state, home])
        for home in ("thread", "process"):
            row[f"{home}_owner_pace"] = median(paces[state, home]) / alone
        rows.append(row)
    return rows, costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("runs/bench"))
    parser.add_argument("--mib", type=int, default=16, help="size of the pushed chunk")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    begun = begin()
    rows, costs = measure(arguments.mib, arguments.seconds, arguments.repeats)
    store(
        arguments.results,
        "server_homes",
        "Where the daemon adds: thread or process (measured)",
        rows,
        costs=costs,
        begun=begun,
    )
    for cost in costs:
        print(f"{cost['home']}: {cost['start_s']:.3f} s to start, {cost['private_MiB']:.1f} MiB private memory")


if __name__ == "__main__":
    main()
