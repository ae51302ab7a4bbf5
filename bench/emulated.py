"""Eight ranks with emulated compute and tiny units: what unequal samples cost each arm, as a matter of scheduling.

Run as `OMP_NUM_THREADS=1 python -m bench.emulated --results bench/results`, or with `--regime swe-smith`.

Compute is *emulated*: each unit's forward and backward sleep for as long as a cost curve says (a third and two thirds),
so eight ranks fit on a small machine. Communication runs for real but is small: four units of 64 KiB are gathered or
fetched, reduced or pushed for every microbatch.

Sleeping is scaled up until, on a balanced control (equal samples, equal counts), `fsdp2` and `odc` are within 5%: then
the table shows what balancing and barriers do, not how slow gloo is on this machine. Lengths are those of
`odc.simulate.lengths`; a sample costs a*l + b*l^2, as for a 7B model. The compute in a bubble is the time slept.

`bound / step` is what no plan can beat (the larger of the mean rank's cost and the longest sample's, slept) over what
the arm took: 1 is the bound reached.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from odc import Settings
from odc.arms import ARMS, ArmName
from odc.balance import Plan, quadratic
from odc.bench.ranks import RankPool, held
from odc.bench.report import store
from odc.bench.units import drop
from odc.experiments.arms import run_minibatch, shard_model
from odc.provenance import begin
from odc.simulate.lengths import NAMED

RANKS, UNITS, WIDTH = 8, 4, 128
#: name -> samples a rank and minibatch: where balancing has most to give, among 2, 4, 8 and 16, beside the paper's 4
REGIMES: dict[str, int] = {"longalign": 4, "swe-smith": 8}
COST = quadratic(8.768 / 32768, 4.348 / 32768**2)
NEAR = 0.05  # how close the arms of the control have to be
_TRIES = 4
DRAWN = 64  # minibatches, of which the most typical ones are run

#: Arms of `odc.arms` in the table's order; the first is the base of speed-ups.
COMPARED: tuple[ArmName, ...] = ("fsdp2-equal-samples", "fsdp2", "fsdp2-resident", "odc-equal-samples", "odc")


def draw_minibatches(regime: str, count: int, steps: int, seed: int) -> tuple[list[list[int]], int]:
    """`count` lengths for each step, and the token cap of a microbatch, which is the longest possible sample."""
    named, generator = NAMED[regime], np.random.default_rng(seed)
    return [named.draw(count, generator).tolist() for _ in range(steps)], named.longest


def typical(regime: str, count: int, steps: int, seed: int, world: int = RANKS) -> tuple[list[list[int]], int]:
    """Of DRAWN minibatches of `count` lengths the `steps` whose costliest sample, as a multiple of what a rank has to
    do on average, is nearest to the mean of them all; and the token cap. So that few minibatches stand for many.
    """
    drawn, cap = draw_minibatches(regime, count, DRAWN, seed)
    bounds = [world * max(map(COST, lengths)) / sum(map(COST, lengths)) for lengths in drawn]
    nearest = sorted(range(DRAWN), key=lambda i: abs(bounds[i] - mean(bounds)))[:steps]
    return [drawn[i] for i in sorted(nearest)], cap


class Slept(torch.autograd.Function):
    """Passes x on; sleeps one part of `seconds` in forward and two in backward. Only this time counts as compute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float, microbatch: int) -> torch.Tensor:
        ctx.seconds, ctx.microbatch = seconds, microbatch
        _compute(seconds / 3, microbatch)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _compute(ctx.seconds * 2 / 3, ctx.microbatch)
        return grads[0], None, None


def _compute(seconds: float, microbatch: int) -> None:
    from odc.trace import recorder

    with recorder().microbatch(microbatch):
        time.sleep(seconds)


class Layer(nn.Module):
    """A unit of 64 KiB whose time is slept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, seconds: float, microbatch: int) -> torch.Tensor:
        y: torch.Tensor = Slept.apply(self.linear(x), seconds, microbatch)
        return y


class Model(nn.Module):
    """Four units and their root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(UNITS))

    def forward(self, x: torch.Tensor, seconds: float, microbatch: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, seconds / UNITS, microbatch)
        return x


@dataclass(frozen=True)
class Run:
    """One arm's steps: its name, one plan a step, and seconds slept for each unit of predicted cost."""

    arm: ArmName
    plans: tuple[Plan, ...]
    scale: float


def run_arm(run: Run) -> Any:
    """Runs the steps after one to warm up; returns this rank's spans. Every rank calls it."""
    from odc.trace import recorder

    drop()
    torch.manual_seed(0)
    model, arm, rank = Model(), ARMS[run.arm], dist.get_rank()
    shard_model(arm, model, list(model.layers), Settings())
    recorder().set_rank(rank)
    for step, plan in enumerate((run.plans[0], *run.plans)):
        count, costs = arm.counts(plan)[rank], [c for c in plan.costs[rank] if c > 0]
        seconds = [c * run.scale * (0.01 if not step else 1) for c in costs] + [0.0] * (count - len(costs))

        def backward(m: int, seconds: list[float] = seconds) -> None:
            model(torch.ones(1, WIDTH), seconds[m], m).sum().backward()

        dist.barrier()
        if step == 1:
            recorder().clear()
        with recorder().window(step):
            run_minibatch(arm, model, count, backward)
        model.zero_grad()
    spans = recorder().spans()
    recorder().clear()
    held.module = model
    drop()
    return spans


def measure(pool: RankPool, run: Run, function: Callable[[Run], Any] = run_arm) -> dict[str, Any]:
    """Seconds by step and the measured bubble of one arm, which `function` runs on every rank."""
    from odc.trace import breakdown, split_waits

    spans = split_waits(dict(enumerate(pool.each(function, run)))).spans_by_rank
    figures = breakdown(spans)
    compute = [mean(row["compute"] for row in step.nanoseconds.values()) / 1e9 for step in figures.steps]
    return {"steps": [step.step_s for step in figures.steps], "compute": compute, "spans": spans}


def bubble(measured: dict[str, Any]) -> float:
    """1 - mean time slept / time, over all steps."""
    return 1 - sum(measured["compute"]) / sum(measured["steps"])


def control_plan(regime: str) -> Plan:
    """A plan with nothing to balance: equal samples, and two microbatches on each rank."""
    cost = COST(int(NAMED[regime].mean)) * REGIMES[regime] / 2
    return Plan.of([[[2 * rank], [2 * rank + 1]] for rank in range(RANKS)], [cost] * (2 * RANKS))


def find_scale(pool: RankPool, plan: Plan, scale: float, longest_s: float) -> tuple[float, list[dict[str, Any]]]:
    """Seconds a unit of cost at which the arms are within NEAR on the control `plan`, and the rows of each try."""
    rows: list[dict[str, Any]] = []
    for _ in range(_TRIES):
        plans = (plan,) * 2
        control: tuple[ArmName, ...] = ("fsdp2", "odc")
        times = {arm: median(measure(pool, Run(arm, plans, scale))["steps"]) for arm in control}
        compute = plan.longest * scale
        apart = times["fsdp2"] / times["odc"] - 1
        rows.append({"slept_s": compute, "fsdp2_s": times["fsdp2"], "odc_s": times["odc"], "fsdp2/odc": 1 + apart})
        print(
            f"control: {compute:.2f} s slept, fsdp2 {times['fsdp2']:.2f} s, odc {times['odc']:.2f} s", file=sys.stderr
        )
        if abs(apart) <= NEAR:
            return scale, rows
        scale = max(scale * 1.2, scale * abs(times["fsdp2"] - times["odc"]) / (0.9 * NEAR * compute))
        if plan.longest * scale > longest_s:
            break
    raise SystemExit(f"the control is not within {NEAR:.0%} below {longest_s:g} s a step on this machine: {rows}")


def table(
    pool: RankPool, regime: str, scale: float, steps: int, seed: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows, one an arm, and each arm's spans."""
    minibatches, cap = typical(regime, RANKS * REGIMES[regime], steps, seed)
    results, plans = {}, {}
    for name in COMPARED:
        plans[name] = tuple(ARMS[name].plan(lengths, RANKS, cap, COST, 0) for lengths in minibatches)
        results[name] = measure(pool, Run(name, plans[name], scale))
        print(f"{name}: {mean(results[name]['steps']):.2f} s a step", file=sys.stderr, flush=True)
    base, bound = sum(results[COMPARED[0]]["steps"]), sum(p.bound for p in plans["odc"]) * scale
    rows = []
    for name in COMPARED:
        measured, arm = results[name], ARMS[name]
        barriers = arm.transport == "collectives"
        predicted = sum(p.stepped if barriers else p.longest for p in plans[name]) * scale
        slept = sum(mean(p.rank_costs) for p in plans[name]) * scale
        rows.append(
            {
                "arm": name,
                "step_s": mean(measured["steps"]),
                "speed-up": base / sum(measured["steps"]),
                "bound / step": bound / sum(measured["steps"]),
                "bubble": bubble(measured),
                "plan_step_s": predicted / steps,
                "plan_bubble": 1 - slept / predicted,
                "microbatches": "/".join(str(max(arm.counts(p))) for p in plans[name]),
                "steps_s": [round(step, 3) for step in measured["steps"]],
            }
        )
    return rows, {name: results[name]["spans"] for name in COMPARED}


def main() -> None:
    from odc.trace import draw

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regime", choices=list(REGIMES), default="longalign", help="lengths and samples a rank")
    parser.add_argument("--results", type=Path, default=Path("runs/bench"))
    parser.add_argument("--steps", type=int, default=6, help="minibatches of each arm, the most typical of those drawn")
    parser.add_argument("--scale", type=float, default=0.1, help="first try: seconds slept for a second of the curve")
    parser.add_argument("--longest", type=float, default=60.0, help="give up when a control's step would sleep longer")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begun = begin()
    with RankPool(RANKS, timeout_s=1800) as pool:
        scale, control = find_scale(pool, control_plan(arguments.regime), arguments.scale, arguments.longest)
        rows, spans = table(pool, arguments.regime, scale, arguments.steps, arguments.seed)
    named, name = NAMED[arguments.regime], f"emulated_{arguments.regime.replace('-', '_')}"
    store(
        arguments.results,
        name,
        f"{RANKS} ranks: scheduling, with slept compute and units of 64 KiB, {arguments.regime}-like lengths",
        [{key: value for key, value in row.items() if key != "steps_s"} for row in rows],
        control=control,
        scale=scale,
        seed=arguments.seed,
        lengths=f"lognormal, sigma {named.sigma}, clipped at {named.longest}, mean {named.mean:g}; "
        f"{REGIMES[arguments.regime]} samples a rank and minibatch",
        steps_s={row["arm"]: row["steps_s"] for row in rows},
        begun=begun,
    )
    picture = arguments.results / f"{name}.png"
    draw(picture, [(title, spans[title]) for title in spans], source="emulated")
    print(f"picture: {picture}")


if __name__ == "__main__":
    main()
