"""Step times that `odc.simulate` predicts, against the real runtime with emulated compute, on 2, 4 and 8 ranks.

Run as `OMP_NUM_THREADS=1 python -m bench.simulated_vs_emulated --results bench/results`, on a machine that does nothing
else. As in `bench.emulated`, compute is *emulated* (slept) and units are of 64 KiB; lengths are LongAlign-like. The
simulator gets the plans' seconds and, for each transport, two costs measured beforehand in steps that sleep nothing: of
one microbatch more, and of a step without any. Nothing else is fitted, and nothing is fitted to the step times that are
compared. FSDP2's reductions block here, as gloo's do.

One more run of each transport has a rank slowed 1.5 times, which the planner does not know.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from statistics import median
from typing import Any

from bench.emulated import COMPARED, REGIMES
from bench.script import Script
from bench.slept import UNITS, Run, draw_minibatches, measure, plans_of
from odc.arms import ARMS, ArmName, Transport
from odc.balance import Plan
from odc.bench.ranks import RankPool
from odc.simulate import Cluster, Model, Step, Unit, simulate

REGIME = "longalign"
NEAR = 0.10  # how close a simulated step has to be
SLOW = 1.5
_FEW, _MANY = 2, 8  # microbatches of the steps that sleep nothing


def idle_plan(ranks: int, microbatches: int) -> Plan:
    """A plan of equal counts, whose cost does not matter."""
    each = [list(range(rank * microbatches, (rank + 1) * microbatches)) for rank in range(ranks)]
    return Plan.of([[[i] for i in one] for one in each], [1.0] * (ranks * microbatches))


def overheads(pool: RankPool, arm: ArmName, ranks: int, steps: int) -> tuple[float, float]:
    """Measured seconds of one microbatch, and of a step beside its microbatches, when compute takes no time."""
    few, many = (median(measure(pool, Run(arm, (idle_plan(ranks, m),) * steps, 0.0))["steps"]) for m in (_FEW, _MANY))
    each = max(0.0, (many - few) / (_MANY - _FEW))
    return each, max(0.0, few - _FEW * each)


def model(how: Transport, each: float, beside: float) -> tuple[Model, float]:
    """The emulated model, and the seconds of each call that make an idle microbatch take `each`."""
    calls = {"collectives": 3 * UNITS, "resident": 0, "on demand": 2 * UNITS}[how]  # gathers and reductions; fetches
    units = (Unit(1.0, 1.0, 1 / UNITS),) * UNITS
    fixed = 0.0 if calls else each / (2 * UNITS)
    return Model(units, unit_seconds=fixed, optimizer_seconds=beside), each / calls if calls else 0.0


def slowed(plan: Plan, rank: int, factor: float) -> Plan:
    """The same plan, one rank's costs multiplied: what a slow rank sleeps."""
    costs = [[cost * (factor if r == rank else 1.0) for cost in each] for r, each in enumerate(plan.costs)]
    return replace(plan, costs=costs)


def compare(pool: RankPool, ranks: int, scale: float, steps: int, seed: int) -> list[dict[str, Any]]:
    """One row for each arm, and one more with a slow rank."""
    minibatches, cap = draw_minibatches(REGIME, ranks * REGIMES[REGIME], steps, seed)
    rows = []
    known: dict[str, tuple[float, float]] = {}
    for name in COMPARED:
        plans = plans_of(name, minibatches, ranks, cap)
        how = ARMS[name].transport
        if how not in known:
            known[how] = overheads(pool, name, ranks, 5)
        units, call = model(how, *known[how])
        for factor in (1.0, SLOW):
            run = Run(name, tuple(slowed(plan, ranks - 1, factor) for plan in plans), scale)
            emulated = sum(measure(pool, run)["steps"])
            cluster = Cluster(ranks, call_seconds=call, reductions_in_flight=0, slow={ranks - 1: factor})
            simulated = sum(simulated_step(plan, how, cluster, units, scale) for plan in plans)
            rows.append(
                {
                    "ranks": ranks,
                    "arm": name + (f", rank {ranks - 1} slowed {factor:g}x" if factor > 1 else ""),
                    "emulated_s": emulated / steps,
                    "simulated_s": simulated / steps,
                    "simulated/emulated": simulated / emulated,
                    "overhead of a microbatch, ms": 1e3 * known[how][0],
                    "within": abs(simulated / emulated - 1) <= NEAR,
                }
            )
            print(f"{ranks} ranks, {rows[-1]['arm']}: simulated/emulated {simulated / emulated:.3f}", file=sys.stderr)
    return rows


def simulated_step(plan: Plan, how: Transport, cluster: Cluster, units: Model, scale: float) -> float:
    """Simulated seconds of one step."""
    seconds = [[cost * scale for cost in each if cost > 0] for each in plan.costs]
    return simulate(Step(cluster, units, seconds, how)).seconds


def main() -> None:
    script = Script(
        __doc__,
        ranks=([2, 4, 8], "numbers of ranks"),
        steps=(4, "minibatches of each arm"),
        scale=(0.25, "seconds slept for a second of the cost curve"),
        seed=(0, "of the lengths"),
    )
    given, rows = script.given, list[dict[str, Any]]()
    for ranks in given.ranks:
        with RankPool(ranks, timeout_s=1800) as pool:
            rows += compare(pool, ranks, given.scale, given.steps, given.seed)
    title = "Simulated step time against emulated (slept) compute with units of 64 KiB, LongAlign-like lengths"
    rule = f"a row is within when simulated and emulated differ by at most {NEAR:.0%}"
    script.store("simulated_vs_emulated", title, rows, rule=rule, seed=given.seed, scale=given.scale)
    raise SystemExit(0 if all(row["within"] for row in rows) else 1)


if __name__ == "__main__":
    main()
