"""A static plan against a queue, with all ranks alike and with one of them slowed; compute is emulated.

Run as `OMP_NUM_THREADS=1 python -m bench.dynamic --results bench/results` (about two minutes). Compute is *emulated*:
each unit's forward and backward sleep for as long as a cost curve says, on the slowed rank FACTOR times as long. All
communication is real: parameters are fetched, gradients pushed, microbatches claimed and their token ids copied from
the rank that holds them. Both arms run the same minibatches, in turn, `--repeats` times; figures are medians over
repeats of the time of all steps.

`odc` follows an LB-Mini plan that takes all ranks for equally fast. `odc-dynamic` gets the microbatches of LB-Dynamic.
The bound, all work over the sum of the ranks' speeds, is what no schedule beats, however it cuts samples.
Lengths are LongAlign-like, as in bench/emulated.py.

With real compute: `odc compare --demo --arms odc,odc-dynamic --slow 1:1.5 --repeats 3`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from bench.emulated import COST, WIDTH, Model, draw_minibatches
from odc import Settings
from odc.arms import ARMS
from odc.balance import Plan
from odc.bench.ranks import RankPool, held
from odc.bench.report import store
from odc.bench.units import drop
from odc.experiments.arms import run_minibatch, run_queue, shard_model
from odc.provenance import begin
from odc.simulate.lengths import NAMED

COMPARED = ("odc", "odc-dynamic")


@dataclass(frozen=True)
class Run:
    """One arm's steps.

    Args:
        arm: its name.
        minibatches: lengths of the samples, by step.
        plans: of each step.
        scale: seconds slept for a unit of predicted cost, on a rank that is not slowed.
        slowdown: of the last rank.
    """

    arm: str
    minibatches: tuple[tuple[int, ...], ...]
    plans: tuple[Plan, ...]
    scale: float
    slowdown: float

    @property
    def queue_bytes(self) -> int:
        """Room for all ids of the largest minibatch, whichever rank loads them."""
        return max(4 * sum(lengths) + 1024 * len(lengths) for lengths in self.minibatches)


def run_arm(run: Run) -> Any:
    """Runs the steps after one to warm up; returns this rank's spans and counts. Every rank calls it."""
    from odc.trace import recorder

    drop()
    torch.manual_seed(0)
    model, arm, rank, world = Model(), ARMS[run.arm], dist.get_rank(), dist.get_world_size()  # type: ignore[index]
    shard_model(arm, model, list(model.layers), Settings(queue_bytes=run.queue_bytes if arm.dynamic else 0))
    recorder().set_rank(rank)
    scale = run.scale * (run.slowdown if rank == world - 1 else 1.0)
    counts = []
    for step, (lengths, plan) in enumerate(
        zip((run.minibatches[0], *run.minibatches), (run.plans[0], *run.plans), strict=True)
    ):
        loads = arm.loads(plan, rank)
        mine = [
            {
                "cost": torch.tensor(cost * (1 if step else 0.01), dtype=torch.float64),
                "ids": torch.zeros(sum(lengths[i] for i in microbatch), dtype=torch.int32),
            }
            for microbatch, cost in loads
        ]
        done: list[int] = []

        def backward(m: int, number: int, microbatch: Mapping[str, torch.Tensor], done: list[int] = done) -> None:
            model(torch.ones(1, WIDTH), float(microbatch["cost"]) * scale, m).sum().backward()
            done.append(number)

        dist.barrier()
        if step == 1:
            recorder().clear()
        with recorder().window(step):
            if arm.dynamic:
                run_queue(arm, model, mine, [cost for _, cost in loads], backward)
            else:
                run_minibatch(arm, model, len(mine), lambda m, mine=mine, backward=backward: backward(m, m, mine[m]))
        model.zero_grad()
        counts.append(len(done))
    spans = recorder().spans()
    recorder().clear()
    held.module = model
    drop()
    return spans, counts[1:]


def measure(pool: RankPool, run: Run) -> dict[str, Any]:
    """Seconds of all steps, the bubble (1 - mean time slept / time), and the share of microbatches of the last rank."""
    from odc.trace import breakdown, split_waits

    answers = pool.each(run_arm, run)
    steps = breakdown(split_waits({rank: spans for rank, (spans, _) in enumerate(answers)}).spans_by_rank).steps
    seconds = sum(step.step_s for step in steps)
    slept = sum(mean(row["compute"] for row in step.nanoseconds.values()) / 1e9 for step in steps)
    counts = [sum(own) for _, own in answers]
    return {"seconds": seconds, "bubble": 1 - slept / seconds, "last": counts[-1] / sum(counts), "n": sum(counts)}


def rows_of(pool: RankPool, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each arm and slowdown; the arms run in turn."""
    world = arguments.ranks
    drawn, cap = draw_minibatches("longalign", world * arguments.samples, arguments.steps, arguments.seed)
    minibatches = tuple(tuple(lengths) for lengths in drawn)
    scale = arguments.seconds / COST(int(NAMED["longalign"].mean))
    plans = {
        arm: tuple(ARMS[arm].plan(lengths, world, cap, COST, 0) for lengths in minibatches)  # type: ignore[index]
        for arm in COMPARED
    }
    work = sum(COST(length) for lengths in minibatches for length in lengths) * scale
    rows = []
    for slowdown in dict.fromkeys((1.0, arguments.slow)):
        found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in COMPARED}
        for repeat in range(arguments.repeats):
            for arm in COMPARED:
                found[arm].append(measure(pool, Run(arm, minibatches, plans[arm], scale, slowdown)))
                print(f"{slowdown:g}x, {repeat + 1}: {arm} {found[arm][-1]['seconds']:.2f} s", file=sys.stderr)
        bound = work / (world - 1 + 1 / slowdown)
        seconds = {arm: [one["seconds"] for one in runs] for arm, runs in found.items()}
        for arm, runs in found.items():
            rows.append(
                {
                    "arm": arm,
                    "last rank": "as the others" if slowdown == 1 else f"{slowdown:g}x slower (emulated)",
                    "step_s": median(seconds[arm]) / arguments.steps,
                    "from-to": f"{min(seconds[arm]) / arguments.steps:.3f}-{max(seconds[arm]) / arguments.steps:.3f}",
                    "speed-up": median(seconds["odc"]) / median(seconds[arm]),
                    "of the bound's speed": bound / median(seconds[arm]),
                    "bubble": median(one["bubble"] for one in runs),
                    "microbatches a step": runs[0]["n"] / arguments.steps,
                    "of them the last rank's": median(one["last"] for one in runs),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("runs/bench"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=6, help="of a rank and minibatch, on average")
    parser.add_argument("--steps", type=int, default=5, help="minibatches of each run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each arm")
    parser.add_argument("--slow", type=float, default=1.5, help="how much slower the last rank is")
    parser.add_argument("--seconds", type=float, default=0.25, help="slept for a sample of mean length")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begun = begin()
    with RankPool(arguments.ranks, timeout_s=1800) as pool:
        rows = rows_of(pool, arguments)
    store(
        arguments.results,
        "dynamic",
        f"{arguments.ranks} ranks: scheduling by a plan and by a queue, with slept compute",
        rows,
        seed=arguments.seed,
        lengths=f"LongAlign-like, {arguments.samples} samples a rank and minibatch; the mean one sleeps "
        f"{arguments.seconds:g} s",
        begun=begun,
    )


if __name__ == "__main__":
    main()
