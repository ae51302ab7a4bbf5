"""A step of a 7B model on H100s in virtual time: who waits for whom under odc, FSDP2 beside it. *Simulated*, all of it.

Run as `OMP_NUM_THREADS=1 python -m bench.virtual_step --results bench/results`; two minutes, on any machine.

odc: its own host code, every rank's threads over real words, on lanes that are clocks (`bench.virtual_ranks`). So
staging slots, credits, the sender's two units, polls and drains are those of a job, and on two hosts the node cache,
reads ahead, links and sums that leave during backward; `odc simulate` leaves most of them out. FSDP2 is a step of
`odc.simulate`, as is odc once more: two models that share no code but the sizes.

Devices: copy engine 380 GB/s one way, HBM 2.5 TB/s, 400 TFLOP/s in bf16, a NIC of 400 Gbit/s each; links are not shared
between fetches and pushes. NCCL brings 326 GB/s, and FSDP2's copies out of its buffers take 0.37 ms a layer in the
compute stream. Activations are recomputed, FSDP2 reduces in fp32 as odc sums. Host time is that of `bench.stand_in`,
rounded up for streams and events. The optimizer is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.script import Script
from bench.slept import typical
from bench.stand_in import units_of
from bench.virtual_ranks import Costs, Figures, Used, VirtualRanks
from odc.arms import arm_named
from odc.balance import Plan
from odc.bench.report import table
from odc.simulate import Cluster, Model, StepResult, Unit
from odc.simulate.scenario import Scenario
from odc.simulate.study import simulate_plan

NAME, MODEL, RANKS = "virtual_step", "qwen2.5-7b", 8
FLOPS, NIC, NCCL = 400e12, 50e9, 326e9
COPY_OUT_S, CALL_S, FORWARD = 0.37e-3, 10e-6, 1 / 4  # forward runs again in backward
ARMS = ("fsdp2", "fsdp2-resident", "odc")
SAMPLES = 8  # of a rank, on average
_EVEN = 16_384  # tokens of each sample of the balanced minibatch


@dataclass(frozen=True)
class Case:
    """A minibatch: its samples' tokens, and how many fit into a microbatch."""

    name: str
    lengths: list[int]
    max_tokens: int


def cases(ranks: int) -> list[Case]:
    """Samples that are all alike, a microbatch each; and a typical minibatch of LongAlign-like ones."""
    (drawn,), room = typical("longalign", SAMPLES * ranks, 1, 0, ranks)
    return [Case("balanced", [_EVEN] * (SAMPLES * ranks), _EVEN), Case("long-tailed", drawn, room)]


def scenario(ranks: int) -> Scenario:
    return Scenario(model=MODEL, machine="h100", ranks=ranks)


def plan_of(arm: str, case: Case, ranks: int) -> Plan:
    """What the arm's balancer makes of the minibatch."""
    like = scenario(ranks)
    return arm_named(arm).plan(
        case.lengths, ranks, case.max_tokens, like.cost(), 0, node=RANKS, floor=like.piece_floor()
    )


def simulated(arm: str, plan: Plan, units: Sequence[Any], ranks: int, costs: Costs) -> StepResult:
    """The step by `odc.simulate`."""
    on_demand = arm.startswith("odc")
    cluster = Cluster(
        ranks,
        RANKS,
        intra_bandwidth=costs.engine if on_demand else NCCL,
        inter_bandwidth=NIC,
        node_cache=on_demand,
        call_seconds=costs.fetch if on_demand else CALL_S,
    )
    layers = len(units) - 2
    sizes = [float(ranks * unit.published_bytes) for unit in (units[-1], units[-2], *units[:layers])]
    wide = 1 if on_demand else 2  # bytes of a gradient as it is sent, over those of a parameter
    made = [Unit(size, wide * size, 0.0 if place < 2 else 1 / layers, place == 0) for place, size in enumerate(sizes)]
    copies = COPY_OUT_S if arm == "fsdp2" else 0.0
    model = Model(tuple(made), FORWARD, copies, accumulator=2.0 if on_demand else 1.0)
    return simulate_plan(plan, arm_named(arm), cluster, model, seconds_per_cost=1 / FLOPS)


def microbatch(seconds: float, layers: int) -> list[Used]:
    """The root and the embedding, then the layers; in backward the other way round. The root stays unsharded."""
    root, embedding = layers + 1, layers
    forward, backward = FORWARD * seconds / layers, (1 - FORWARD) * seconds / layers
    return [
        Used(root, 0.0, True, False),
        Used(embedding, 0.0, True, False),
        *(Used(layer, forward, True, False) for layer in range(layers)),
        *(Used(layer, backward, True, True) for layer in reversed(range(layers))),
        Used(embedding, 0.0, True, True),
        Used(root, 0.0, False, True),
    ]


def by_own_code(plan: Plan, units: Sequence[Any], costs: Costs) -> list[Figures]:
    """Of odc's step, rank by rank."""
    layers = len(units) - 2
    jobs = [[microbatch(cost / FLOPS, layers) for cost in listed if cost] for listed in plan.costs]
    return VirtualRanks(units, jobs, costs, hosts=len(jobs) // RANKS).run()


@dataclass(frozen=True)
class RankRow:
    """What one rank's device does in a step, in seconds; `slots` is what its sender waits beside that."""

    machine: str
    minibatch: str
    arm: str
    rank: int
    compute: float
    fetch: float  # waits for a unit
    host: float  # ... for this rank's host
    ends: float  # publishing, the last pushes, the sums
    waiting: float  # ... for other ranks
    slots: float


def rows_of(figures: Sequence[Figures], names: tuple[str, str, str]) -> list[RankRow]:
    return [
        RankRow(
            *names,
            rank,
            one.compute,
            one.fetch,
            max(0.0, one.host),
            one.begin + one.end + one.sums,
            one.waiting,
            one.slots,
        )
        for rank, one in enumerate(figures)
    ]


def rows_from(result: StepResult, names: tuple[str, str, str]) -> list[RankRow]:
    """Of a step of `odc.simulate`, which knows only these parts."""
    pairs = zip(result.busy, result.transfer, strict=True)
    return [
        RankRow(*names, rank, busy, moved, 0.0, 0.0, result.seconds - busy - moved, 0.0)
        for rank, (busy, moved) in enumerate(pairs)
    ]


def longest(figures: Sequence[Figures], most: int = 2) -> list[tuple[str, float]]:
    """The longest waits of threads for other ranks."""
    found = [(what, seconds) for one in figures for what, seconds in one.waits.items()]
    return sorted(found, key=lambda each: -each[1])[:most]


def run() -> tuple[list[dict[str, Any]], list[RankRow], dict[str, str]]:
    """Steps, what every rank does in each, and the longest waits by machine and minibatch."""
    costs, steps, ranks, waits = Costs(), list[dict[str, Any]](), list[RankRow](), dict[str, str]()
    for machine, count in (("8 x H100", RANKS), ("2 x 8 H100", 2 * RANKS)):
        units = units_of(MODEL, count)
        for case in cases(count):
            base = 0.0
            for arm in ARMS:
                names, plan = (machine, case.name, arm), plan_of(arm, case, count)
                result = simulated(arm, plan, units, count, costs)
                seconds, found, other = result.seconds, rows_from(result, names), ""
                if arm == "odc":
                    figures = by_own_code(plan, units, costs)
                    seconds, found = max(one.step for one in figures), rows_of(figures, names)
                    other = f"{result.seconds:.3f}"
                    waits[f"{machine}, {case.name}"] = "; ".join(
                        f"{what} {s * 1e3:.1f} ms" for what, s in longest(figures)
                    )
                base = base or seconds
                ranks += found
                steps.append(
                    {
                        "machine": machine,
                        "minibatch": case.name,
                        "arm": arm,
                        "by": "odc's host code" if other else "odc.simulate",
                        "step, s": seconds,
                        "times fsdp2's speed": base / seconds,
                        "computing": f"{sum(one.compute for one in found) / count / seconds:.1%}",
                        "waiting for ranks": f"{sum(one.waiting for one in found) / count / seconds:.1%}",
                        "odc simulate, s": other,
                    }
                )
    return steps, ranks, waits


def draw(ranks: Sequence[RankRow], path: Path) -> None:
    """A bar for every rank, by machine, minibatch and arm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = dict.fromkeys((one.machine, one.minibatch) for one in ranks)
    colours = {"compute": "#2e7d32", "fetch": "#f9a825", "host": "#8d6e63", "ends": "#5c6bc0", "waiting": "#cfd8dc"}
    figure = Figure(figsize=(11, 3.2 * len(kinds)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(kinds), len(ARMS), sharex="row", sharey="row", squeeze=False)
    for line, kind in zip(grid, kinds, strict=True):
        for axes, arm in zip(line, ARMS, strict=True):
            mine = [one for one in ranks if (one.machine, one.minibatch, one.arm) == (*kind, arm)]
            left = [0.0] * len(mine)
            for part, colour in colours.items():
                widths = [max(0.0, getattr(one, part)) for one in mine]
                axes.barh([one.rank for one in mine], widths, left=left, color=colour, label=part, height=0.8)
                left = [begin + width for begin, width in zip(left, widths, strict=True)]
            axes.set_title(f"{arm}, {', '.join(kind)}: {max(left):.2f} s", fontsize=9)
            axes.set_xlabel("seconds (simulated)", fontsize=9)
            axes.set_yticks(range(0, len(mine), len(mine) // 4))
        line[0].set_ylabel("rank")
        line[0].invert_yaxis()
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
    figure.suptitle("A step of Qwen2.5-7B on H100s (simulated)")
    figure.savefig(path, dpi=110)


def main() -> None:
    script = Script(__doc__)
    steps, ranks, waits = run()
    rows = [asdict(one) for one in ranks]
    script.store(
        NAME,
        "A step of Qwen2.5-7B on H100s, in seconds (simulated)",
        steps,
        ranks=rows,
        waits=waits,
        measured=False,
    )
    print(table([row for row in rows if row["machine"] == "8 x H100"]))
    for name, text in waits.items():
        print(f"longest waits, {name}: {text}")
    draw(ranks, script.given.results / f"{NAME}.png")


if __name__ == "__main__":
    main()
