"""Eight ranks with emulated compute and tiny units: what unequal samples cost each arm, as a matter of scheduling.

Run as `OMP_NUM_THREADS=1 python -m bench.emulated --results bench/results`, or with `--regime swe-smith`. Compute is
*emulated* (slept), as `bench.slept` describes.

Sleeping is scaled up until, on a balanced control (equal samples, equal counts), `fsdp2` and `odc` are within 5%: then
the table shows what balancing and barriers do, not how slow gloo is on this machine. Lengths are those of
`odc.simulate.lengths`; a sample costs a*l + b*l^2, as for a 7B model. The compute in a bubble is the time slept.

`bound / step` is what no plan can beat (the larger of the mean rank's cost and the longest sample's, slept) over what
the arm took: 1 is the bound reached.
"""

from __future__ import annotations

import sys
from statistics import mean
from typing import Any

from bench.script import Script
from bench.slept import COST, NEAR, RANKS, Run, bubble, control, measure, plans_of, typical
from odc.arms import ARMS, ArmName
from odc.balance import Plan
from odc.bench.ranks import RankPool
from odc.simulate.lengths import NAMED

#: name -> samples a rank and minibatch: where balancing has most to give, among 2, 4, 8 and 16, beside the paper's 4
REGIMES: dict[str, int] = {"longalign": 4, "swe-smith": 8}
_TRIES = 4

#: Arms of `odc.arms` in the table's order; the first is the base of speed-ups.
COMPARED: tuple[ArmName, ...] = ("fsdp2-equal-samples", "fsdp2", "fsdp2-resident", "odc-equal-samples", "odc")


def control_plan(regime: str) -> Plan:
    """A plan with nothing to balance: equal samples, and two microbatches on each rank."""
    cost = COST(int(NAMED[regime].mean)) * REGIMES[regime] / 2
    return Plan.of([[[2 * rank], [2 * rank + 1]] for rank in range(RANKS)], [cost] * (2 * RANKS))


def find_scale(pool: RankPool, plan: Plan, scale: float, longest_s: float) -> tuple[float, list[dict[str, Any]]]:
    """Seconds a unit of cost at which the arms are within NEAR on the control `plan`, and the rows of each try."""
    rows: list[dict[str, Any]] = []
    for _ in range(_TRIES):
        times, compute = control(pool, plan, scale), plan.longest * scale
        ratio = times["fsdp2"] / times["odc"]
        rows.append({"slept_s": compute, "fsdp2_s": times["fsdp2"], "odc_s": times["odc"], "fsdp2/odc": ratio})
        if abs(ratio - 1) <= NEAR:
            return scale, rows
        scale = max(scale * 1.2, scale * abs(times["fsdp2"] - times["odc"]) / (0.9 * NEAR * compute))
        if plan.longest * scale > longest_s:
            break
    raise SystemExit(f"the control is not within {NEAR:.0%} below {longest_s:g} s a step on this machine: {rows}")


def table(
    pool: RankPool, regime: str, scale: float, steps: int, seed: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows, one an arm, and what was measured of each."""
    minibatches, cap = typical(regime, RANKS * REGIMES[regime], steps, seed)
    plans = {name: plans_of(name, minibatches, RANKS, cap) for name in COMPARED}
    results = {}
    for name in COMPARED:
        results[name] = measure(pool, Run(name, plans[name], scale))
        print(f"{name}: {mean(results[name]['steps']):.2f} s a step", file=sys.stderr, flush=True)
    base, bound = sum(results[COMPARED[0]]["steps"]), sum(plan.bound for plan in plans["odc"]) * scale
    rows = []
    for name, measured in results.items():
        arm, took = ARMS[name], sum(measured["steps"])
        barriers = arm.transport == "collectives"
        predicted = sum(plan.stepped if barriers else plan.longest for plan in plans[name]) * scale
        slept = sum(mean(plan.rank_costs) for plan in plans[name]) * scale
        rows.append(
            {
                "arm": name,
                "step_s": took / steps,
                "speed-up": base / took,
                "bound / step": bound / took,
                "bubble": bubble(measured),
                "plan_step_s": predicted / steps,
                "plan_bubble": 1 - slept / predicted,
                "microbatches": "/".join(str(max(arm.counts(plan))) for plan in plans[name]),
            }
        )
    return rows, results


def main() -> None:
    from odc.trace import draw

    script = Script(
        __doc__,
        regime=("longalign", "lengths and samples a rank", REGIMES),
        steps=(6, "minibatches of each arm, the most typical of those drawn"),
        scale=(0.1, "first try: seconds slept for a second of the curve"),
        longest=(60.0, "give up when a control's step would sleep longer"),
        seed=(0, "of the lengths"),
    )
    given = script.given
    with RankPool(RANKS, timeout_s=1800) as pool:
        scale, tried = find_scale(pool, control_plan(given.regime), given.scale, given.longest)
        rows, measured = table(pool, given.regime, scale, given.steps, given.seed)
    named, name = NAMED[given.regime], f"emulated_{given.regime.replace('-', '_')}"
    script.store(
        name,
        f"{RANKS} ranks: scheduling, with slept compute and units of 64 KiB, {given.regime}-like lengths",
        rows,
        control=tried,
        scale=scale,
        seed=given.seed,
        lengths=f"lognormal, sigma {named.sigma}, clipped at {named.longest}, mean {named.mean:g}; "
        f"{REGIMES[given.regime]} samples a rank and minibatch",
        steps_s={arm: [round(step, 3) for step in one["steps"]] for arm, one in measured.items()},
    )
    draw(given.results / f"{name}.png", [(arm, one["spans"]) for arm, one in measured.items()], source="emulated")


if __name__ == "__main__":
    main()
