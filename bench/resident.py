"""Four places at which the ranks of an FSDP2 model with resident parameters can meet, by the step time they take.

Run as `OMP_NUM_THREADS=1 python -m bench.resident --results bench/results` (some minutes). Compute is *emulated*
(slept) and all communication is real, as in `bench.emulated`; plans are LB-Mini's, so ranks run unequal microbatches.
Gathers happen in the first forward, or all of them before it. Reductions happen in the backward of the last
microbatch, or in that of a dummy after it. `fsdp2-resident` is the last way.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
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
from odc.experiments import arms
from odc.provenance import begin

ARM = ARMS["fsdp2-resident"]


@dataclass(frozen=True)
class Run:
    """The plans of one way's minibatches, and seconds slept for a unit of predicted cost."""

    ahead: bool
    dummy: bool
    plans: tuple[Plan, ...]
    scale: float


def run_way(run: Run) -> list[float]:
    """Seconds of each minibatch after one to warm up, from barrier to barrier. Every rank calls it."""
    drop()
    torch.manual_seed(0)
    model, rank, took = Model(), dist.get_rank(), []
    arms.shard_model(ARM, model, list(model.layers), Settings())
    for step, plan in enumerate((run.plans[0], *run.plans)):
        seconds = [cost * run.scale * (1 if step else 0.01) for cost in plan.costs[rank] if cost > 0]
        if run.dummy or not seconds:
            seconds.append(0.0)
        dist.barrier()
        begin = time.perf_counter()
        if run.ahead:
            arms._gather_all(model)
        for m, slept in enumerate(seconds):
            last = m == len(seconds) - 1
            arms._mark(model, last=last)
            model(torch.ones(1, WIDTH), slept, m).sum().backward()
            if not last:
                arms.fsdp.forget_forward_order(model)
        dist.barrier()
        took.append(time.perf_counter() - begin)
        model.zero_grad()
    held.module = model
    drop()
    return took[1:]


def rows_of(pool: RankPool, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a way; the ways run in turn."""
    drawn, cap = draw_minibatches("longalign", pool.world * arguments.samples, arguments.steps, arguments.seed)
    plans = tuple(ARM.plan(lengths, pool.world, cap, COST, 0) for lengths in drawn)
    longest = sum(plan.longest for plan in plans) * arguments.scale
    found: dict[tuple[bool, bool], list[float]] = {way: [] for way in product((False, True), repeat=2)}
    for repeat in range(arguments.repeats):
        for (ahead, dummy), runs in found.items():
            by_rank = pool.each(run_way, Run(ahead, dummy, plans, arguments.scale))
            runs.append(sum(max(ranks) for ranks in zip(*by_rank, strict=True)))
            print(f"{repeat + 1}: ahead {ahead}, dummy {dummy}: {runs[-1]:.2f} s", file=sys.stderr, flush=True)
    return [
        {
            "gathers": "all before the first forward" if ahead else "in the first forward",
            "reductions": "in a dummy's backward" if dummy else "in the last backward",
            "step_s": median(runs) / arguments.steps,
            "step / longest rank's compute": median(runs) / longest,
            "runs_s": " ".join(f"{one:.2f}" for one in runs),
        }
        for (ahead, dummy), runs in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("runs/bench"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4, help="of a minibatch, a rank")
    parser.add_argument("--steps", type=int, default=4, help="minibatches of each way")
    parser.add_argument("--scale", type=float, default=0.1, help="seconds slept for a second of the cost curve")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begun = begin()
    with RankPool(arguments.ranks, timeout_s=1800) as pool:
        rows = rows_of(pool, arguments)
    title = f"{arguments.ranks} ranks, emulated (slept) compute, real communication: where FSDP2 meets, LB-Mini's plans"
    store(arguments.results, "resident", title, rows, begun=begun, seed=arguments.seed, scale=arguments.scale)


if __name__ == "__main__":
    main()
