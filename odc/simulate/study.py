"""Simulating a plan, a scenario under several arms, and sweeps along one field of a scenario.

Every arm sees the same minibatches. Figures are ratios of summed step times, so a long step counts for what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from odc.arms import Arm, arm_named
from odc.balance import Plan, lower_bound
from odc.errors import ConfigError
from odc.simulate.cluster import Cluster
from odc.simulate.events import simulate
from odc.simulate.lengths import lengths_named
from odc.simulate.scenario import Scenario
from odc.simulate.step import Step, StepResult
from odc.simulate.workload import Gang, Model


def simulate_plan(
    plan: Plan,
    arm: Arm,
    cluster: Cluster,
    model: Model,
    *,
    seconds_per_cost: float = 1.0,
    prefetch: int = 1,
    seed: int = 0,
    kv_bytes: float = 0.0,
    exchange_seconds: float | None = None,
) -> StepResult:
    """One step of a plan under an arm's transport; `seconds_per_cost` turns the plan's costs into seconds.

    Empty microbatches of a plan are placeholders: left out on demand, dummies under collectives. `kv_bytes` are those
    of the keys and values of a token in one layer, of which a piece gets those of all tokens that it does not hold; or
    each exchange takes `exchange_seconds`.
    """
    seconds = [
        [cost * seconds_per_cost for cost, samples in zip(costs, own, strict=True) if samples]
        for costs, own in zip(plan.costs, plan.ranks, strict=True)
    ]
    gangs = [
        Gang(
            tuple(split.ranks),
            tuple(cost * seconds_per_cost for cost in split.costs),
            cluster.peer_seconds(kv_bytes * (split.length - min(split.tokens)))
            if exchange_seconds is None
            else exchange_seconds,
        )
        for split in plan.splits
    ]
    return simulate(Step(cluster, model, seconds, arm.transport, arm.within_node, prefetch, seed, gangs))


#: Fields a sweep may go along -> the label of an axis.
AXES: dict[str, str] = {
    "samples_per_rank": "samples per rank in a minibatch",
    "max_length": "longest sample, tokens",
    "packing_ratio": "packing ratio",
    "ranks": "devices",
}


@dataclass(frozen=True)
class ArmFigures:
    """One arm over all minibatches, simulated."""

    arm: str
    step_s: float  # mean seconds a step
    speedup: float  # all steps of the first arm / all steps of this one
    bubble: float  # 1 - busy / step over all steps
    transfer: float  # the part of the bubble that waits for transfers
    waiting: float  # the part that waits for other ranks
    microbatches: float  # mean for each rank and step, dummies included
    node_bytes: float  # mean that leave a node in a step
    steps_s: tuple[float, ...]


@dataclass(frozen=True)
class Study:
    """A simulated scenario: figures of its arms, in its order, and the bound on every plan."""

    scenario: Scenario
    arms: tuple[ArmFigures, ...]
    bound_s: float  # mean over minibatches of the lower bound on the longest rank's compute, without jitter

    def __getitem__(self, arm: str) -> ArmFigures:
        return next(figures for figures in self.arms if figures.arm == arm)

    def to_dict(self) -> dict[str, Any]:
        """The study as plain data for JSON."""
        arms = {one.arm: {k: v for k, v in asdict(one).items() if k != "arm"} for one in self.arms}
        return {"scenario": self.scenario.to_dict(), "bound_s": self.bound_s, "arms": arms}


def study(scenario: Scenario) -> Study:
    """Simulate every minibatch of a scenario under every arm."""
    minibatches, max_tokens = scenario.draw()
    cost, cluster, model = scenario.cost(), scenario.cluster(), scenario.units()
    per_cost, floor, kv_bytes = scenario.seconds_per_flop(), scenario.piece_floor(), scenario.kv_bytes()
    results: dict[str, list[StepResult]] = {name: [] for name in scenario.arms}
    speeds = [1.0 / factor for factor in cluster.slowness()]
    bounds = []
    for number, lengths in enumerate(minibatches):
        costs = [cost(length) for length in lengths]
        bounds.append(lower_bound(costs, scenario.ranks, speeds=speeds) * per_cost)
        plans: dict[str, Plan] = {}
        for name in scenario.arms:
            arm = arm_named(name)
            if arm.balance not in plans:
                plans[arm.balance] = arm.plan(
                    lengths, scenario.ranks, max_tokens, cost, scenario.seed, node=cluster.node, floor=floor
                )
            results[name].append(
                simulate_plan(
                    plans[arm.balance],
                    arm,
                    cluster,
                    model,
                    seconds_per_cost=per_cost,
                    prefetch=scenario.prefetch,
                    seed=scenario.seed + number,
                    kv_bytes=kv_bytes,
                )
            )
    base = sum(result.seconds for result in results[scenario.arms[0]])
    return Study(scenario, tuple(_figures(name, own, base) for name, own in results.items()), fmean(bounds))


def _figures(arm: str, results: Sequence[StepResult], base: float) -> ArmFigures:
    total = sum(result.seconds for result in results)
    return ArmFigures(
        arm=arm,
        step_s=total / len(results),
        speedup=base / total,
        bubble=1 - sum(fmean(result.busy) for result in results) / total,
        transfer=sum(fmean(result.transfer) for result in results) / total,
        waiting=sum(result.wait_share * result.seconds for result in results) / total,
        microbatches=fmean(fmean(result.microbatches) for result in results),
        node_bytes=fmean(result.node_bytes for result in results),
        steps_s=tuple(result.seconds for result in results),
    )


def sweep(
    scenario: Scenario, axis: str, values: Sequence[float], progress: Callable[[str], None] | None = None
) -> list[Study]:
    """One study for each value of the field `axis` (one of AXES); everything else stays as in `scenario`."""
    _require_axis(axis)
    studies = []
    for value in values:
        if progress is not None:
            progress(f"{axis} {value:g}")
        studies.append(study(_changed(scenario, axis, value)))
    return studies


def usual_values(scenario: Scenario, axis: str) -> list[float]:
    """Values of a sweep around a scenario, as the paper's figure 10 has them, but for those that it cannot have."""
    _require_axis(axis)
    longest = scenario.max_length or lengths_named(scenario.lengths).longest
    usual = {
        "samples_per_rank": [1, 2, 4, 8, 16],
        "packing_ratio": [1, 2, 4, 8],
        "ranks": sorted({2, 4, 8, 16, 32, scenario.ranks}),
        "max_length": [longest // 8, longest // 4, longest // 2, longest],
    }
    return [value for value in usual[axis] if _can_be(scenario, axis, value)]


def _changed(scenario: Scenario, axis: str, value: float) -> Scenario:
    return scenario.with_(**{axis: value if axis == "packing_ratio" else int(value)})


def _can_be(scenario: Scenario, axis: str, value: float) -> bool:
    try:
        _changed(scenario, axis, value)
    except ConfigError:
        return False
    return True


def _require_axis(axis: str) -> None:
    if axis not in AXES:
        raise ConfigError(f"there is no sweep along {axis!r}; there are {', '.join(AXES)}")
