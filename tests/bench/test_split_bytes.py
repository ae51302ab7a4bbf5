"""Split samples whose attention is left out still read every key and value, and give gradients of the same size."""

from __future__ import annotations

import torch

from bench.split_bytes import HEADS, TOKEN_BYTES, read_blocks, read_blocks_backward
from odc.balance.slices import zigzag
from odc.split.attention import attend_blocks, attend_blocks_backward
from odc.split.cut import Cut

TOKENS, WIDTH = 64, 8


class Seen(dict[int, torch.Tensor]):
    """Keys and values by place; `read` has the places that were asked for."""

    def __init__(self, parts: dict[int, torch.Tensor]) -> None:
        super().__init__(parts)
        self.read = list[int]()

    def __getitem__(self, place: int) -> torch.Tensor:
        self.read.append(place)
        return super().__getitem__(place)


def test_what_attention_would_read_is_read() -> None:
    cut = Cut(zigzag(TOKENS, 4))
    parts = {place: torch.randn(2, HEADS, size, WIDTH) for place, size in enumerate(cut.sizes)}
    for place, size in enumerate(cut.sizes):
        blocks, query = cut.blocks(place, None), torch.randn(1, HEADS, size, WIDTH)
        real, idle = Seen(parts), Seen(parts)
        expected, made = attend_blocks(query, real, blocks, 1.0), read_blocks(query, idle, blocks, 1.0)
        assert idle.read == real.read
        assert (made.out.shape, made.lse.shape) == (expected.out.shape, expected.lse.shape)
        grads = attend_blocks_backward(query, query, parts, blocks, expected, 1.0, torch.zeros_like(query))
        idle_grads = read_blocks_backward(query, query, idle, blocks, made, 1.0, torch.zeros_like(query))
        assert {k: (g.shape, g.dtype) for k, g in idle_grads.items()} == {
            k: (g.shape, g.dtype) for k, g in grads.items()
        }


def test_a_token_has_as_many_bytes_as_in_a_7b_model() -> None:
    assert TOKEN_BYTES == 28 * 2 * 4 * 128 * 2  # Qwen2.5-7B: layers, keys and values, key heads, width, bf16
