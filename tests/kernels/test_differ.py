"""differ, interpreted: it sees one bit that changed, wherever it lies, and nothing else."""

from __future__ import annotations

import pytest
import torch
from support.kernel_heaps import numbers
from support.on_ranks import on_interpreted_ranks

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@on_interpreted_ranks(1)
def test_every_changed_element_is_seen(rank: int, world: int) -> None:
    from odc.kernels import differ, publish

    def asks(places: list[torch.Tensor], shards: list[torch.Tensor], block: int | None) -> int:
        found = torch.zeros(1, dtype=torch.int32)
        differ(places, shards, found, block=block)
        return int(found)

    for to, own in ((BF16, F32), (F32, F32), (F16, F64), (F64, BF16)):
        for here, there in ((0, 0), (1, 0), (0, 3)):
            shards = [numbers(1, 50, own)[here : here + 37], numbers(2, 16, own)]
            places = [torch.zeros(50, dtype=to)[there : there + 37], torch.zeros(16, dtype=to)]
            publish(places, shards)
            for block in (16, None):
                what = f"{own} to {to}, from {here} to {there}, blocks of {block}"
                assert not asks(places, shards, block), what
                for shard, at in ((0, 0), (0, 15), (0, 16), (0, 31), (0, 36), (1, 15)):
                    before = shards[shard][at].clone()
                    shards[shard][at] = -before
                    assert asks(places, shards, block) == 1, f"{what}: element {at}"
                    shards[shard][at] = before


@on_interpreted_ranks(1)
def test_nan_is_equal_to_itself_and_the_zeros_are_not(rank: int, world: int) -> None:
    from odc.kernels import differ, publish

    for to, own in ((BF16, F32), (F32, F32)):
        shard, place = torch.tensor([float("nan"), 0.0], dtype=own), torch.zeros(2, dtype=to)
        publish([place], [shard])
        found = torch.zeros(1, dtype=torch.int32)
        differ([place], [shard], found)
        assert not found, "a NaN is what was published of it"
        differ([place], [torch.tensor([float("nan"), -0.0], dtype=own)], found)
        assert found, "the zeros differ in a bit"
    with pytest.raises(ValueError, match="an int32 on the device"):
        differ([place], [shard], torch.zeros(1))
