"""Eight ranks with emulated compute, whose long samples run as pieces: what splitting gains by samples a rank.

Run as `OMP_NUM_THREADS=1 python -m bench.split --regime longalign --results bench/results`. Compute is *emulated*
(slept), as `bench.slept` describes; what the bytes of all keys and values cost is measured by `bench.split_bytes`.

A control of equal samples comes first: on it `fsdp2` and `odc` are within 5%, else nothing is stored. `odc-split` is
*simulated* too, by `odc.simulate` with costs measured in steps that sleep nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from bench.script import Script
from bench.simulated_vs_emulated import idle_plan, overheads
from bench.slept import COST, DRAWN, NEAR, RANKS, TOKENS, UNITS, Run, bubble, control, measure, plans_of, typical
from odc.arms import ARMS, ArmName
from odc.balance import Plan, SplitSample
from odc.balance.slices import zigzag
from odc.bench.ranks import RankPool
from odc.simulate import Cluster, Model, Unit, simulate_plan
from odc.simulate.lengths import NAMED

COMPARED: tuple[ArmName, ...] = ("fsdp2-equal-samples", "fsdp2", "odc", "odc-split")


def idle_gangs(count: int, pieces: int) -> Plan:
    """`count` samples in so many pieces on each rank, and nothing else; they cost nothing."""
    blocks = [list(range(first, first + pieces)) for first in range(0, RANKS, pieces)]
    splits = [
        SplitSample(number, ranks, zigzag(64 * TOKENS, pieces), [0.0] * pieces)
        for number, ranks in enumerate(blocks * count)
    ]
    return Plan([[] for _ in range(RANKS)], [[] for _ in range(RANKS)], 1.0, splits=splits)


@dataclass(frozen=True)
class Overheads:
    """Seconds of one microbatch, of a step beside its microbatches, and of one piece, where compute takes no time."""

    microbatch: float
    step: float
    piece: float

    def simulated(self, plan: Plan, scale: float) -> float:
        """Seconds of one simulated step of `odc-split`; nothing is fitted to what is compared."""
        cluster = Cluster(RANKS, call_seconds=self.microbatch / (2 * UNITS))
        units = Model((Unit(1.0, 1.0, 1 / UNITS),) * UNITS, optimizer_seconds=self.step)
        # Each of a piece's exchanges (one a unit in forward, two in backward) is a `peer_seconds` of this cluster.
        exchange = max(0.0, self.piece - self.microbatch) / (3 * UNITS)
        return simulate_plan(
            plan, ARMS["odc-split"], cluster, units, seconds_per_cost=scale, exchange_seconds=exchange
        ).seconds


def find_overheads(pool: RankPool) -> Overheads:
    """Measured on steps that sleep nothing; a piece is one of four of its sample."""
    each, beside = overheads(pool, "odc", RANKS, 3)
    few, many = (median(measure(pool, Run("odc-split", (idle_gangs(count, 4),) * 3, 0.0))["steps"]) for count in (2, 8))
    return Overheads(each, beside, (many - few) / 6)


def controlled(pool: RankPool, seconds: float) -> dict[str, float]:
    """Seconds of a step under `fsdp2` and `odc` where every rank sleeps `seconds` in two microbatches."""
    found = control(pool, idle_plan(RANKS, 2), seconds / 2)
    if abs(found["fsdp2"] / found["odc"] - 1) > NEAR:
        raise SystemExit(f"on the control fsdp2 and odc are not within {NEAR:.0%}: {found}; take more --seconds")
    return found | {"slept_s": seconds}


def rows_of(pool: RankPool, count: int, known: Overheads, given: Any) -> list[dict[str, Any]]:
    """One row for each arm; `over mean` is the step over what each rank would sleep if all could be divided."""
    minibatches, cap = typical(given.regime, RANKS * count, given.steps, given.seed)
    ideal = mean(sum(map(COST, lengths)) / RANKS for lengths in minibatches)
    scale, rows = given.seconds / ideal, []
    for name in COMPARED if count > 1 else COMPARED[1:]:  # one sample a rank leaves no room for equal counts
        plans = plans_of(name, minibatches, RANKS, cap)
        measured = measure(pool, Run(name, plans, scale))
        step = mean(measured["steps"])
        rows.append(
            {
                "regime": given.regime,
                "samples a rank": count,
                "arm": name,
                "step_s": step,
                "over mean": step / given.seconds,
                "pieces": mean(sum(len(split.ranks) for split in plan.splits) for plan in plans),
                "bubble": bubble(measured),
                "simulated/emulated": "",
            }
        )
        if name == "odc-split":
            rows[-1]["simulated/emulated"] = mean(known.simulated(plan, scale) for plan in plans) / step
        print(f"{count} a rank, {name}: {rows[-1]}", file=sys.stderr, flush=True)
    for row in rows:
        row["speed-up"] = next(one["step_s"] for one in rows if one["arm"] == "fsdp2") / row["step_s"]
    return rows


def main() -> None:
    script = Script(
        __doc__,
        regime=("longalign", "lengths", ("longalign", "swe-smith")),
        counts=([1, 2, 4], "samples a rank"),
        steps=(2, "minibatches of each arm"),
        seconds=(8.0, "slept by the mean rank in a step"),
        seed=(0, "of the lengths"),
    )
    given, rows = script.given, list[dict[str, Any]]()
    with RankPool(RANKS, timeout_s=1800) as pool:
        known, near = find_overheads(pool), controlled(pool, given.seconds)
        for count in given.counts:
            rows += rows_of(pool, count, known, given)
    named, most = NAMED[given.regime], f"{given.steps} most" if given.steps > 1 else "most"
    script.store(
        f"split_{given.regime.replace('-', '_')}",
        f"{RANKS} ranks: long samples split, with slept compute and units of 64 KiB, {given.regime}-like lengths",
        rows,
        control=near,
        overheads={"microbatch_s": known.microbatch, "step_s": known.step, "piece_s": known.piece},
        lengths=f"lognormal, sigma {named.sigma}, clipped at {named.longest}, mean {named.mean:g}; "
        f"the {most} typical of {DRAWN} minibatches",
        seed=given.seed,
    )


if __name__ == "__main__":
    main()
