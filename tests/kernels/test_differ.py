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

    def asks(places: list[torch.Tensor], shards: list[torch.Tensor], block: int | None) -> list[int]:
        found = torch.tensor([0, 0, 7], dtype=torch.int32)
        differ(places, shards, found, block=block)
        *named, beyond = found.tolist()
        assert beyond == 7, "of no shard"
        return named

    for to, own in ((BF16, F32), (F32, F32), (F16, F64), (F64, BF16)):
        for here, there in ((0, 0), (1, 0), (0, 3)):
            shards = [numbers(1, 50, own)[here : here + 37], numbers(2, 16, own)]
            places = [torch.zeros(50, dtype=to)[there : there + 37], torch.zeros(16, dtype=to)]
            publish(places, shards)
            for block in (16, None):
                what = f"{own} to {to}, from {here} to {there}, blocks of {block}"
                assert asks(places, shards, block) == [0, 0], what
                for shard, at in ((0, 0), (0, 15), (0, 16), (0, 31), (0, 36), (1, 15)):
                    before = shards[shard][at].clone()
                    shards[shard][at] = -before
                    assert asks(places, shards, block) == [shard == 0, shard == 1], f"{what}: element {at}"
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
    for wrong in (torch.zeros(1), torch.zeros(0, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)[::2]):
        with pytest.raises(ValueError, match="an int32 for each place"):
            differ([place], [shard], wrong)


@on_interpreted_ranks(1)
def test_shards_of_several_dtypes_keep_their_numbers(rank: int, world: int) -> None:
    """A launch for each pair of dtypes, and an empty shard, which has no program."""
    from odc.kernels import differ, publish

    shards = [torch.ones(3), torch.ones(4, dtype=F64), torch.ones(0), torch.ones(5), torch.ones(2, dtype=F64)]
    places = [torch.zeros(len(shard), dtype=BF16) for shard in shards]
    publish(places, shards)
    for changed in (0, 1, 3, 4):
        shards[changed][1] += 1
        found = torch.zeros(5, dtype=torch.int32)
        differ(places, shards, found)
        assert found.tolist() == [int(i == changed) for i in range(5)]
        shards[changed][1] -= 1


@on_interpreted_ranks(1)
def test_the_same_memory_is_compared_anew_each_time(rank: int, world: int) -> None:
    """What is kept of a launch are addresses: other memory, of other sizes, has launches of its own."""
    from odc.kernels import differ, publish

    buffer, now = torch.zeros(64), torch.arange(64.0)
    for begin, end in ((0, 64), (0, 32), (0, 64), (32, 64)):
        buffer.zero_()
        publish([buffer[begin:end]], [now[begin:end]])
        assert buffer.nonzero().flatten().tolist() == list(range(max(1, begin), end))
        found = torch.zeros(1, dtype=torch.int32)
        differ([buffer[begin:end]], [now[begin:end]], found)
        assert not found
        now[end - 1] *= -1
        differ([buffer[begin:end]], [now[begin:end]], found)
        assert found
        now[end - 1] *= -1
