"""Split samples: processor time of two pieces over that of the whole sample.

A Llama of two layers runs a sample of 4,096 tokens forward and backward: whole, on both ranks at once, and as two
zig-zag pieces, in turns, so both ways share the machine's load. `pieces_over_whole` is the time of both pieces over
that of one whole sample, the median of the turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from odc.balance import Plan, SplitSample
from odc.balance.slices import zigzag
from odc.bench.ranks import RankPool, held, let_go, meet

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
