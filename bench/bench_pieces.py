"""Split samples: processor time of two pieces over that of the whole sample, and what planning takes up to 4,096 ranks.

A Llama of two layers runs a sample of 4,096 tokens forward and backward: whole, on both ranks at once, and as two
zig-zag pieces, in turns, so both ways share the machine's load. `pieces_over_whole` is the time of both pieces over
that of one whole sample, the median of the turns. Planning is `lb_split` on LongAlign-like lengths with the cost of
Qwen2.5-7B and hosts of 8 ranks, in processor time, beside `lb_mini` on the same lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from odc.balance import Plan, SplitSample, cost_from_config, lb_mini, lb_split, partition
from odc.balance.slices import zigzag
from odc.bench.dispatching import draw_lengths
from odc.bench.ranks import RankPool, held, let_go, meet
from odc.simulate.catalog import MODELS

TOKENS, VOCABULARY, TURNS = 4096, 2048, 5


def build(dtype: str) -> None:
    """The model, unsharded, and its splitter, with one sample and its plan."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from odc.split import Splitter

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
    )
    config._attn_implementation = "sdpa"
    held.model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    held.splitter = Splitter(held.model, TOKENS, name=f"bench-{dtype}")
    held.closing = [held.splitter]
    held.tokens = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    split = SplitSample(0, [0, 1], zigzag(TOKENS, 2), [1.0, 1.0])
    held.plan = Plan.of([[], []], [2.0], splits=[split])
    held.splitter.prepare()
    meet()


def _backward(targets: torch.Tensor, **inputs: Any) -> None:
    logits = held.model(use_cache=False, **inputs).logits[0]
    cross_entropy(logits.float(), targets, reduction="sum").backward()


def whole() -> float:
    """Processor seconds of the whole sample on this rank."""
    meet()
    began = time.process_time()
    targets = torch.cat([held.tokens[1:], torch.tensor([-100])])
    _backward(targets, input_ids=held.tokens[None], position_ids=torch.arange(TOKENS)[None])
    return time.process_time() - began


def pieces() -> float:
    """Processor seconds of this rank's piece."""
    meet()
    began = time.process_time()
    for piece in held.splitter.pieces(held.plan):
        inputs, targets = piece.of(held.tokens)
        inputs.pop("use_cache")
        _backward(targets, **inputs)
    return time.process_time() - began


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_processor_time(dtype: str, note: Callable[..., None]) -> None:
    with RankPool(2) as pool:
        pool.each(build, dtype)
        turns = []
        for turn in range(1 + TURNS):
            alone, split = pool.each(whole), pool.each(pieces)
            if turn:  # the first warms up
                turns.append((sum(alone) / 2, sum(split)))
        pool.each(let_go)
    ratios = [split / alone for alone, split in turns]
    note(
        what=f"two pieces of {TOKENS} tokens, {dtype}",
        whole_s=median(alone for alone, _ in turns),
        pieces_s=median(split for _, split in turns),
        pieces_over_whole=f"{median(ratios):.3f}",
        least=f"{min(ratios):.3f}",
        most=f"{max(ratios):.3f}",
    )


@pytest.mark.parametrize("ranks", [8, 64, 512, 4096])
@pytest.mark.parametrize("per_rank", [1, 2, 4])
def test_planning(ranks: int, per_rank: int, note: Callable[..., None]) -> None:
    cost, lengths = cost_from_config(MODELS["qwen2.5-7b"]), draw_lengths(ranks * per_rank).tolist()
    partition(np.arange(1000), 4)  # numba is loaded

    def planned(plan: Callable[[], Plan]) -> tuple[Plan, float]:
        took = []
        for _ in range(3):
            began = time.process_time()
            made = plan()
            took.append(time.process_time() - began)
        return made, 1e3 * min(took)

    mini, mini_ms = planned(lambda: lb_mini(lengths, ranks, 1 << 17, cost))
    split, split_ms = planned(lambda: lb_split(lengths, ranks, 1 << 17, cost, node=8))
    mean = np.mean(mini.rank_costs)
    note(
        what=f"plan, {per_rank} a rank on {ranks}",
        lb_mini_ms=mini_ms,
        lb_split_ms=split_ms,
        lb_mini_over_mean=f"{mini.longest / mean:.3f}",
        lb_split_over_mean=f"{split.longest / mean:.3f}",
        pieces=sum(len(one.ranks) for one in split.splits),
    )
