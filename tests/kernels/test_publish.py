"""publish, interpreted, against plain torch: other processes read what was published, converted."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.kernel_heaps import numbers, same_bits, shared, skew
from support.kernel_references import publish_reference
from support.on_ranks import on_interpreted_ranks

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
#: (own dtype, compute dtype, elements) of each parameter; places follow each other at 16 bytes.
PARAMS = [(F32, BF16, 333), (F32, BF16, 7), (F64, F32, 64), (BF16, BF16, 100), (F32, F16, 1), (F32, F32, 0)]


def places(memory: Callable[[torch.dtype], torch.Tensor]) -> list[torch.Tensor]:
    """Views of a published buffer."""
    views, end = [], 0
    for _, dtype, numel in PARAMS:
        start = end // dtype.itemsize
        views.append(memory(dtype)[start : start + numel])
        end += -(-numel * dtype.itemsize // 16) * 16
    return views


def shards_of(rank: int, epoch: int) -> list[torch.Tensor]:
    return [numbers(10 * rank + epoch, numel, own) for own, _, numel in PARAMS]


@on_interpreted_ranks(2)
def test_peers_read_what_was_published(rank: int, world: int) -> None:
    from odc.kernels import publish

    draw = random.Random(rank)
    with shared("publish", rank, world, 4096) as heaps:
        for epoch in range(3):
            skew(draw)
            publish(
                places(lambda dtype: heaps.memory(rank, dtype)), shards_of(rank, epoch), block=draw.choice([32, None])
            )
            dist.barrier()
            skew(draw)
            for peer in range(world):
                expected = torch.zeros_like(heaps.memory(peer))
                publish_reference(places(expected.view), shards_of(peer, epoch))
                assert same_bits(heaps.memory(peer), expected), f"epoch {epoch} of rank {peer}"
            dist.barrier()


@on_interpreted_ranks(1)
def test_bad_calls_are_refused(rank: int, world: int) -> None:
    from odc.kernels import publish

    with pytest.raises(ValueError, match="3 elements do not fit a target of 4"):
        publish([torch.zeros(4)], [torch.zeros(3)])
    with pytest.raises(ValueError, match="source 0 is not contiguous"):
        publish([torch.zeros(4)], [torch.zeros(4, 2)[:, 0]])
    publish([], [])
