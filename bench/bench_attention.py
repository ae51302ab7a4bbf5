"""Forward and backward of one packed row of 8,192 tokens: attention per document beside SDPA with a block mask.

The table of each group gives the ratio. The row is packed from documents of the sizes of Python sources, from 64 short
ones, or from a single long one. The heads are those of `qwen2-tiny`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from odc.experiments.text.attention import document_attention

HEADS, SHARED, WIDTH, TOKENS = 4, 2, 32, 8192
ROWS = {
    "sources": (3150, 1810, 1204, 790, 512, 356, 210, 98, 34, 28),
    "short": (128,) * 64,
    "single": (TOKENS,),
}


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, TOKENS, WIDTH, requires_grad=True) for heads in (HEADS, SHARED, SHARED)]


def per_document(lengths: tuple[int, ...]) -> Callable[[], None]:
    q, k, v = tensors()
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)

    def run() -> None:
        document_attention(torch.nn.Identity(), q, k, v, cu_seq_lens_q=starts)[0].sum().backward()

    return run


def block_mask(lengths: tuple[int, ...]) -> Callable[[], None]:
    q, k, v = tensors()
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (owner[:, None] == owner[None]).tril()[None, None]

    def run() -> None:
        shared = (t.repeat_interleave(HEADS // SHARED, dim=1) for t in (k, v))
        scaled_dot_product_attention(q, *shared, attn_mask=mask).sum().backward()

    return run


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("way", [per_document, block_mask], ids=["per document", "block mask"])
def test_attention(benchmark, row: str, way: Callable[[tuple[int, ...]], Callable[[], None]]):
    assert sum(ROWS[row]) == TOKENS
    benchmark.group = f"{row}: {len(ROWS[row])} documents, {TOKENS} tokens"
    benchmark.pedantic(way(ROWS[row]), rounds=5, warmup_rounds=1)
