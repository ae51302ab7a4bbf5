"""Ranks with *emulated* compute: a unit's forward and backward sleep for as long as a cost curve gives.

So eight ranks fit on a small machine, and a step shows what balancing and barriers do. Communication runs for real but
is small: units of 64 KiB are gathered or fetched, reduced or pushed for every microbatch. A piece of a split sample
attends for real and exchanges keys and values through the arenas of `odc.split`, of one token in `Run.tokens`.

`bench.emulated`, `bench.split`, `bench.split_bytes` and `bench.simulated_vs_emulated` run arms this way.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from odc import Settings
from odc.arms import ARMS, ArmName
from odc.balance import Plan, quadratic
from odc.balance.slices import zigzag
from odc.bench.ranks import RankPool, held
from odc.bench.units import drop
from odc.experiments.arms import run_minibatch, shard_model
from odc.simulate.lengths import NAMED
from odc.split import Splitter, attend

RANKS, UNITS, WIDTH = 8, 4, 128
COST = quadratic(8.768 / 32768, 4.348 / 32768**2)  # of a sample of so many tokens, as for a 7B model
NEAR = 0.05  # how close `fsdp2` and `odc` have to be on a control with nothing to balance
DRAWN = 64  # minibatches, of which the most typical ones are run
TOKENS = 256  # tokens of a plan for one that pieces exchange
LONGEST = 1024  # of those, at least as many as any sample has

_names = itertools.count()


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


def plans_of(arm: ArmName, minibatches: list[list[int]], ranks: int, cap: int) -> tuple[Plan, ...]:
    """The plan that an arm makes of each minibatch."""
    return tuple(ARMS[arm].plan(lengths, ranks, cap, COST, 0) for lengths in minibatches)


class Slept(torch.autograd.Function):
    """Passes x on; sleeps one part of `seconds` in forward and two in backward. Only this time counts as compute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, microbatch: int) -> Tensor:
        ctx.seconds, ctx.microbatch = seconds, microbatch
        _compute(seconds / 3, microbatch)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _compute(ctx.seconds * 2 / 3, ctx.microbatch)
        return grads[0], None, None


def _compute(seconds: float, microbatch: int) -> None:
    from odc.trace import recorder

    with recorder().microbatch(microbatch):
        time.sleep(seconds)


class Layer(nn.Module):
    """A unit of 64 KiB that attends with its output as queries, keys and values; its time is slept."""

    def __init__(self, number: int, heads: int) -> None:
        super().__init__()
        self.number, self.heads, self.linear = number, heads, nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, seconds: float, microbatch: int, piece: Any) -> Tensor:
        y = self.linear(x)[:, None].expand(-1, self.heads, -1, -1)
        if piece is None:
            y = scaled_dot_product_attention(y, y, y, is_causal=True)
        else:
            y = attend(y, y, y, piece, self.number)
        slept: Tensor = Slept.apply(x + y.mean(1), seconds, microbatch)
        return slept


class Model(nn.Module):
    """`units` such units; output [rows, tokens, WIDTH]. One forward and backward sleep `seconds`."""

    def __init__(self, units: int = UNITS, heads: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number, heads) for number in range(units))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        odc_piece: Any = None,
        seconds: float = 0.0,
        microbatch: int = -1,
    ) -> Tensor:
        x = torch.sin((input_ids + position_ids)[..., None] * torch.arange(1.0, WIDTH + 1))
        for layer in self.layers:
            x = layer(x, seconds / len(self.layers), microbatch, odc_piece)
        return x


@dataclass(frozen=True)
class Run:
    """One arm's steps: its name, one plan a step, and seconds slept for each unit of predicted cost.

    The model has `units` units of `heads` heads. Of `tokens` tokens of a split sample, which has at most `longest` of
    those, one is exchanged.
    """

    arm: ArmName
    plans: tuple[Plan, ...]
    scale: float
    units: int = UNITS
    heads: int = 1
    tokens: int = TOKENS
    longest: int = LONGEST


def run_arm(run: Run) -> Any:
    """Runs the steps after one to warm up; returns this rank's spans. Every rank calls it."""
    from odc.trace import piece_of, recorder

    drop()
    torch.manual_seed(0)
    model, arm, rank = Model(run.units, run.heads), ARMS[run.arm], dist.get_rank()
    splitter = Splitter(model, run.longest, layers=run.units, name=f"bench{next(_names)}") if arm.splits else None
    shard_model(arm, model, list(model.layers), Settings())
    if splitter is not None:
        splitter.prepare()
    recorder().rank = rank
    for step, plan in enumerate((run.plans[0], *run.plans)):
        scale, count = run.scale * (1 if step else 0.01), arm.counts(plan)[rank]
        seconds = [cost * scale for cost in plan.costs[rank] if cost > 0]
        seconds += [0.0] * (count - len(seconds))

        def pieces(plan: Plan = plan, scale: float = scale) -> None:
            assert splitter is not None
            for number, piece in enumerate(splitter.pieces(thinned(plan, run.tokens))):
                mine = plan.splits[[split.sample for split in plan.splits].index(piece.sample)]
                inputs, _ = piece.of(torch.arange(piece.split.length))
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


def measure(pool: RankPool, run: Run, function: Callable[[Run], Any] = run_arm) -> dict[str, Any]:
    """Seconds by step, seconds slept, and spans of one arm, which `function` runs on every rank."""
    from odc.trace import breakdown, split_waits

    spans = split_waits(dict(enumerate(pool.each(function, run)))).spans_by_rank
    figures = breakdown(spans)
    compute = [mean(row["compute"] for row in step.nanoseconds.values()) / 1e9 for step in figures.steps]
    return {"steps": [step.step_s for step in figures.steps], "compute": compute, "spans": spans}


def bubble(measured: dict[str, Any]) -> float:
    """1 - mean time slept / time, over all steps."""
    return 1 - sum(measured["compute"]) / sum(measured["steps"])


def control(pool: RankPool, plan: Plan, scale: float) -> dict[str, float]:
    """Median seconds of a step under `fsdp2` and `odc` on `plan`, which leaves nothing to balance."""
    arms: tuple[ArmName, ...] = ("fsdp2", "odc")
    found: dict[str, float] = {arm: median(measure(pool, Run(arm, (plan,) * 2, scale))["steps"]) for arm in arms}
    print(f"control: {plan.longest * scale:.2f} s slept, {found}", file=sys.stderr, flush=True)
    return found
