"""What moving the true bytes of keys and values costs split samples, which `bench.split` leaves out.

Run as `OMP_NUM_THREADS=1 python -m bench.split_bytes --results bench/results` (minutes, up to 7 GiB of memory).

Compute is *emulated*: slept by the cost of a 7B model, and the arithmetic of attention is left out. The bytes are true:
LAYERS layers of 2 KiB of keys and values a token, as Qwen2.5-7B has them in bf16, for every token of every piece. They
are written into the arenas of `odc.split` and read there by the ranks that attend to them; their gradients travel back.
Lengths are LongAlign-like, cut at LONGEST. `odc-split, thinned` runs the same plans with one token in 256 exchanged, as
`bench.split` does. Units remain small: parameters are not what is measured.
"""

from __future__ import annotations

import sys
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from bench.script import Script
from bench.slept import COST, TOKENS, WIDTH, Run, measure, plans_of, run_arm, typical
from odc.arms import ArmName
from odc.bench.ranks import RankPool
from odc.split import piece
from odc.split.attention import Merged, Parts
from odc.split.cut import Block

RANKS, LAYERS, HEADS, LONGEST = 4, 28, 2, 16384
TOKEN_BYTES = LAYERS * 2 * HEADS * WIDTH * 4  # of keys and values, of all layers: fp32 of half as many heads
_WAYS: dict[str, tuple[ArmName, int]] = {  # arm, and tokens of which one is exchanged
    "odc": ("odc", 1),
    "odc-split, thinned": ("odc-split", TOKENS),
    "odc-split": ("odc-split", 1),
}


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


def run_wide(run: Run) -> Any:
    """`run_arm` without the arithmetic of attention; every rank calls it."""
    kept = piece.attend_blocks, piece.attend_blocks_backward
    piece.attend_blocks, piece.attend_blocks_backward = read_blocks, read_blocks_backward
    try:
        return run_arm(run)
    finally:
        piece.attend_blocks, piece.attend_blocks_backward = kept


def main() -> None:
    script = Script(__doc__, steps=(2, "minibatches of each arm"), seconds=(8.0, "slept by the mean rank in a step"))
    given, rows = script.given, list[dict[str, Any]]()
    drawn, _ = typical("longalign", RANKS, given.steps, 0, RANKS)
    minibatches = [[min(length, LONGEST) for length in lengths] for lengths in drawn]
    scale = given.seconds / mean(sum(map(COST, lengths)) / RANKS for lengths in minibatches)
    with RankPool(RANKS, timeout_s=1800) as pool:
        for way, (arm, tokens) in _WAYS.items():
            plans = plans_of(arm, minibatches, RANKS, LONGEST)
            run = Run(arm, plans, scale, LAYERS, HEADS, tokens, LONGEST)
            step = mean(measure(pool, run, run_wide)["steps"])
            exchanged = mean(sum(split.length for split in plan.splits) for plan in plans) * TOKEN_BYTES / tokens
            rows.append(
                {
                    "way": way,
                    "step_s": step,
                    "over mean": step / given.seconds,
                    "pieces": mean(sum(len(split.ranks) for split in plan.splits) for plan in plans),
                    "keys and values, MiB a step": exchanged / 2**20,
                }
            )
            print(f"{way}: {rows[-1]}", file=sys.stderr, flush=True)
    title = f"{RANKS} ranks: split samples with slept compute and the true bytes of keys and values"
    lengths = f"LongAlign-like, cut at {LONGEST}, one sample a rank"
    script.store("split_bytes", title, rows, lengths=lengths, slept_s=given.seconds)


if __name__ == "__main__":
    main()
