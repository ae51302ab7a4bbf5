"""What moving the true bytes of keys and values costs split samples, which `bench.split` leaves out.

Run as `OMP_NUM_THREADS=1 python -m bench.split_bytes --results bench/results` (minutes, up to 7 GiB of memory).

Compute is *emulated*: slept by the cost of a 7B model, and the arithmetic of attention is left out. The bytes are true:
LAYERS layers of 2 KiB of keys and values a token, as Qwen2.5-7B has them in bf16, for every token of every piece. They
are written into the arenas of `odc.split` and read there by the ranks that attend to them; their gradients travel back.
Lengths are LongAlign-like, cut at LONGEST. `odc-split, thinned` runs the same plans with one token in 256 exchanged, as
`bench.split` does. Units remain small: parameters are not what is measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bench.emulated import COST, WIDTH, Run, Slept, measure, typical
from bench.split import TOKENS, run_arm
from odc.arms import ARMS, ArmName
from odc.bench.ranks import RankPool
from odc.bench.report import store
from odc.provenance import begin
from odc.split import attend, piece
from odc.split.attention import Merged, Parts
from odc.split.cut import Block

RANKS, LAYERS, HEADS, LONGEST = 4, 28, 2, 16384
TOKEN_BYTES = LAYERS * 2 * HEADS * WIDTH * 4  # of keys and values, of all layers: fp32 of half as many heads
_WAYS: dict[str, tuple[ArmName, int]] = {  # arm, and tokens of which one is exchanged
    "odc": ("odc", 1),
    "odc-split, thinned": ("odc-split", TOKENS),
    "odc-split": ("odc-split", 1),
}


class WideLayer(nn.Module):
    """A unit of 64 KiB whose keys and values are as wide as those of a layer of a 7B model; its time is slept."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, seconds: float, microbatch: int, given: Any) -> Tensor:
        y = self.linear(x)[:, None].expand(-1, HEADS, -1, -1)
        if given is None:
            out = scaled_dot_product_attention(y, y, y, is_causal=True)
        else:
            out = attend(y, y, y, given, self.number)
        slept: Tensor = Slept.apply(x + out.mean(1), seconds, microbatch)
        return slept


class WideModel(nn.Module):
    """LAYERS such units; output [rows, tokens, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WideLayer(number) for number in range(LAYERS))

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
            x = layer(x, seconds / LAYERS, microbatch, odc_piece)
        return x


def read_blocks(query: Tensor, parts: Parts, blocks: list[Block], scale: float) -> Merged:
    """In place of `attend_blocks`: reads every key and value that it would, and computes nothing."""
    for block in blocks:
        parts[block.owner][:, :, block.keys].clone()
    nothing = query.new_zeros(())
    return Merged(nothing.expand(query.shape), nothing.expand(query.shape[:-1]), [()] * len(blocks))


def read_blocks_backward(
    grad: Tensor, query: Tensor, parts: Parts, blocks: list[Block], merged: Merged, scale: float, dq: Tensor
) -> Parts:
    """In place of `attend_blocks_backward`: reads them again, and makes gradients of their size."""
    read_blocks(query, parts, blocks, scale)
    return {owner: torch.zeros_like(parts[owner]) for owner in {block.owner for block in blocks}}


def run_wide(run: Run, tokens: int) -> Any:
    """`run_arm` with the true bytes of one token in `tokens`; every rank calls it."""
    kept = piece.attend_blocks, piece.attend_blocks_backward
    piece.attend_blocks, piece.attend_blocks_backward = read_blocks, read_blocks_backward
    try:
        return run_arm(run, WideModel, LONGEST, tokens)
    finally:
        piece.attend_blocks, piece.attend_blocks_backward = kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("runs/bench"))
    parser.add_argument("--steps", type=int, default=2, help="minibatches of each arm")
    parser.add_argument("--seconds", type=float, default=8.0, help="slept by the mean rank in a step")
    arguments = parser.parse_args()
    begun, rows = begin(), list[dict[str, Any]]()
    drawn, _ = typical("longalign", RANKS, arguments.steps, 0, RANKS)
    minibatches = [[min(length, LONGEST) for length in lengths] for lengths in drawn]
    scale = arguments.seconds / mean(sum(map(COST, lengths)) / RANKS for lengths in minibatches)
    with RankPool(RANKS, timeout_s=1800) as pool:
        for way, (arm, tokens) in _WAYS.items():
            plans = tuple(ARMS[arm].plan(lengths, RANKS, LONGEST, COST, 0) for lengths in minibatches)
            function = run_true if tokens == 1 else run_thinned
            step = mean(measure(pool, Run(arm, plans, scale), function)["steps"])
            exchanged = mean(sum(split.length for split in plan.splits) for plan in plans) * TOKEN_BYTES / tokens
            rows.append(
                {
                    "way": way,
                    "step_s": step,
                    "over mean": step / arguments.seconds,
                    "pieces": mean(sum(len(split.ranks) for split in plan.splits) for plan in plans),
                    "keys and values, MiB a step": exchanged / 2**20,
                }
            )
            print(f"{way}: {rows[-1]}", file=sys.stderr, flush=True)
    title = f"{RANKS} ranks: split samples with slept compute and the true bytes of keys and values"
    lengths = f"LongAlign-like, cut at {LONGEST}, one sample a rank"
    store(arguments.results, "split_bytes", title, rows, lengths=lengths, slept_s=arguments.seconds, begun=begun)


def run_true(run: Run) -> Any:
    """Every token is exchanged."""
    return run_wide(run, 1)


def run_thinned(run: Run) -> Any:
    """One token in TOKENS is exchanged."""
    return run_wide(run, TOKENS)


if __name__ == "__main__":
    main()
