"""Eight ranks with emulated compute, whose long samples run as pieces: what splitting gains by samples a rank.

Run as `OMP_NUM_THREADS=1 python -m bench.split --regime longalign --results bench/results`.

As in `bench.emulated`, compute is *emulated* (slept by the cost of a 7B model), communication is real but small. Pieces
attend for real and exchange keys and values through the arenas of `odc.split`, of one token in TOKENS; what the bytes
of all tokens cost is measured by `bench.split_bytes`.

A control of equal samples comes first: on it `fsdp2` and `odc` are within 5%, else nothing is stored. `odc-split` is
*simulated* too, by `odc.simulate` with costs measured in steps that sleep nothing.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from bench.emulated import COST, DRAWN, NEAR, RANKS, UNITS, WIDTH, Run, Slept, bubble, measure, typical
from bench.simulated_vs_emulated import idle_plan, overheads
from odc import Settings
from odc.arms import ARMS, ArmName
from odc.balance import Plan, SplitSample
from odc.balance.slices import zigzag
from odc.bench.ranks import RankPool, held
from odc.bench.report import store
from odc.bench.units import drop
from odc.experiments.arms import run_minibatch, shard_model
from odc.provenance import begin
from odc.simulate import Cluster, Model, Unit, simulate_plan
from odc.simulate.lengths import NAMED
from odc.split import Splitter, attend

REGIMES, COUNTS = ("longalign", "swe-smith"), (1, 2, 4)
COMPARED: tuple[ArmName, ...] = ("fsdp2-equal-samples", "fsdp2", "odc", "odc-split")
TOKENS = 256  # tokens of a plan for one that is exchanged
LONGEST = 1024  # of those, at least as many as any sample has

_names = itertools.count()


class AttendingLayer(nn.Module):
    """A unit of 64 KiB that attends with its own output as queries, keys and values; its time is slept."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, seconds: float, microbatch: int, piece: Any) -> torch.Tensor:
        y = self.linear(x)[:, None]
        if piece is None:
            y = scaled_dot_product_attention(y, y, y, is_causal=True)
        else:
            y = attend(y, y, y, piece, self.number)
        slept: torch.Tensor = Slept.apply(y[:, 0], seconds, microbatch)
        return slept


class AttendingModel(nn.Module):
    """Four such units; output [rows, tokens, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AttendingLayer(number) for number in range(UNITS))

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        odc_piece: Any = None,
        seconds: float = 0.0,
        microbatch: int = -1,
    ) -> torch.Tensor:
        x = torch.sin((input_ids + position_ids)[..., None] * torch.arange(1.0, WIDTH + 1))
        for layer in self.layers:
            x = layer(x, seconds / UNITS, microbatch, odc_piece)
        return x


def run_arm(run: Run, make: Callable[[], Any] = AttendingModel, longest: int = LONGEST, tokens: int = TOKENS) -> Any:
    """On every rank: build the model, run the steps after one to warm up; returns this rank's spans.

    Of `tokens` tokens of a split sample, which has at most `longest` of those, one is exchanged.
    """
    from odc.trace import piece_of, recorder

    drop()
    torch.manual_seed(0)
    model, arm, rank = make(), ARMS[run.arm], dist.get_rank()
    layers = len(model.layers)
    splitter = Splitter(model, longest, layers=layers, name=f"bench{next(_names)}") if arm.splits else None
    shard_model(arm, model, list(model.layers), Settings())
    if splitter is not None:
        splitter.prepare()
    recorder().set_rank(rank)
    for step, plan in enumerate((run.plans[0], *run.plans)):
        count, costs = arm.counts(plan)[rank], [c for c in plan.costs[rank] if c > 0]
        scale = run.scale * (0.01 if not step else 1)
        seconds = [cost * scale for cost in costs] + [0.0] * (count - len(costs))

        def pieces(plan: Plan = plan, scale: float = scale) -> None:
            assert splitter is not None
            for number, piece in enumerate(splitter.pieces(thinned(plan, tokens))):
                ids = torch.arange(piece.split.length)
                mine = plan.splits[[split.sample for split in plan.splits].index(piece.sample)]
                inputs, _ = piece.of(ids)
                slept = mine.costs[mine.ranks.index(rank)] * scale
                with recorder().microbatch(number, piece_of(piece.sample)):
                    model(**inputs, seconds=slept, microbatch=number).sum().backward()

        def backward(m: int, seconds: list[float] = seconds) -> None:
            one = torch.zeros(1, 1, dtype=torch.int64)
            model(one, one, seconds=seconds[m], microbatch=m).sum().backward()

        dist.barrier()
        if step == 1:
            recorder().clear()
        with recorder().window(step):
            run_minibatch(arm, model, count, backward, pieces if arm.splits else None)
        model.zero_grad()
    spans = recorder().spans()
    recorder().clear()
    if splitter is not None:
        splitter.close()
    held.module = model
    drop()
    return spans


def thinned(plan: Plan, tokens: int = TOKENS) -> Plan:
    """The plan with one token in `tokens` of its split samples, as their pieces attend and exchange them."""
    splits = [
        replace(split, slices=zigzag(max(split.length // tokens, 2 * len(split.ranks)), len(split.ranks)))
        for split in plan.splits
    ]
    return replace(plan, splits=splits)


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
    each, beside = overheads(pool, "odc", RANKS, 3, run_arm)
    few, many = (
        median(measure(pool, Run("odc-split", (idle_gangs(count, 4),) * 3, 0.0), run_arm)["steps"]) for count in (2, 8)
    )
    return Overheads(each, beside, (many - few) / 6)


def control(pool: RankPool, seconds: float) -> dict[str, float]:
    """Seconds of a step under `fsdp2` and `odc` where every rank sleeps `seconds` in two microbatches."""
    plans = (idle_plan(RANKS, 2),) * 2
    runs = {arm: Run(arm, plans, seconds / 2) for arm in ("fsdp2", "odc")}  # type: ignore[arg-type]
    found = {arm: median(measure(pool, run, run_arm)["steps"]) for arm, run in runs.items()}
    print(f"control: {seconds:.1f} s slept, {found}", file=sys.stderr, flush=True)
    if abs(found["fsdp2"] / found["odc"] - 1) > NEAR:
        raise SystemExit(f"on the control fsdp2 and odc are not within {NEAR:.0%}: {found}; take more --seconds")
    return found | {"slept_s": seconds}


def rows_of(
    pool: RankPool, regime: str, count: int, known: Overheads, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row for each arm; `over mean` is the step over what each rank would sleep if all could be divided."""
    minibatches, cap = typical(regime, RANKS * count, arguments.steps, arguments.seed)
    ideal = mean(sum(map(COST, lengths)) / RANKS for lengths in minibatches)
    scale, rows = arguments.seconds / ideal, []
    for name in COMPARED if count > 1 else COMPARED[1:]:  # one sample a rank leaves no room for equal counts
        plans = tuple(ARMS[name].plan(lengths, RANKS, cap, COST, 0) for lengths in minibatches)
        measured = measure(pool, Run(name, plans, scale), run_arm)
        step = mean(measured["steps"])
        rows.append(
            {
                "regime": regime,
                "samples a rank": count,
                "arm": name,
                "step_s": step,
                "over mean": step / arguments.seconds,
                "pieces": mean(sum(len(split.ranks) for split in plan.splits) for plan in plans),
                "bubble": bubble(measured),
                "simulated/emulated": "",
            }
        )
        if name == "odc-split":
            rows[-1]["simulated/emulated"] = mean(known.simulated(plan, scale) for plan in plans) / step
        print(f"{regime}, {count} a rank, {name}: {rows[-1]}", file=sys.stderr, flush=True)
    for row in rows:
        row["speed-up"] = next(one["step_s"] for one in rows if one["arm"] == "fsdp2") / row["step_s"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regime", choices=REGIMES, default="longalign", help="lengths")
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS), help="samples a rank")
    parser.add_argument("--results", type=Path, default=Path("runs/bench"))
    parser.add_argument("--steps", type=int, default=2, help="minibatches of each arm")
    parser.add_argument("--seconds", type=float, default=8.0, help="slept by the mean rank in a step")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begun, rows = begin(), []
    with RankPool(RANKS, timeout_s=1800) as pool:
        known, controlled = find_overheads(pool), control(pool, arguments.seconds)
        for count in arguments.counts:
            rows += rows_of(pool, arguments.regime, count, known, arguments)
    named = NAMED[arguments.regime]
    store(
        arguments.results,
        f"split_{arguments.regime.replace('-', '_')}",
        f"{RANKS} ranks: long samples split, with slept compute and units of 64 KiB, {arguments.regime}-like lengths",
        rows,
        control=controlled,
        overheads={"microbatch_s": known.microbatch, "step_s": known.step, "piece_s": known.piece},
        lengths=f"lognormal, sigma {named.sigma}, clipped at {named.longest}, mean {named.mean:g}; "
        f"the {arguments.steps} most typical of {DRAWN} minibatches",
        seed=arguments.seed,
        begun=begun,
    )


if __name__ == "__main__":
    main()
