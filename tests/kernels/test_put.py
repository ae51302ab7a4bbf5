"""put and signal, interpreted: slots of other processes' heaps are whole once their word is there."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from support.kernel_heaps import numbers, same_bits, shared, skew
from support.kernel_references import put_reference
from support.on_ranks import on_interpreted_ranks

F32, BF16 = torch.float32, torch.bfloat16
SLOT, WORD = 4096, 4096 * 4  # bytes of a slot for each rank, then the words


def blocks_of(source: int, round_: int) -> list[torch.Tensor]:
    """Several tensors of two dtypes, an empty one among them."""
    seed = 100 * source + round_
    return [numbers(seed, 130 + round_, F32), numbers(seed + 1, 7, BF16), numbers(seed, 0, F32), numbers(seed, 1, BF16)]


@pytest.mark.parametrize("world", [2, 3])
@on_interpreted_ranks()
def test_slots_are_whole_once_their_word_says_so(rank: int, world: int) -> None:
    """Every rank puts into its slot at the next rank and reads what the rank before has put, in no common rhythm."""
    from odc.kernels import Signal, put

    draw, arrived = random.Random(rank), torch.zeros(1, dtype=torch.int32)
    to, source = (rank + 1) % world, (rank - 1) % world
    with shared(f"put-{world}", rank, world, WORD + 64) as heaps:
        dist.barrier()
        for i in range(1, 9):
            skew(draw)
            while heaps.words(to).load(rank) < i - 1:  # taken: the slot is free
                time.sleep(1e-4)
            signal = Signal(WORD + 8 * rank, i, arrived)
            put(blocks_of(rank, i), heaps.table, to, SLOT * rank, signal=signal, block=draw.choice([16, 256]))
            assert int(arrived) == 0
            skew(draw)
            word = heaps.memory(rank, torch.int64)[WORD // 8 + source :]
            while int(word[0]) < i:
                time.sleep(1e-4)
            expected = [torch.zeros(WORD + 64, dtype=torch.uint8)]
            sent = Signal(WORD + 8 * source, i, arrived)
            put_reference(blocks_of(source, i), expected, 0, SLOT * source, signal=sent)
            part = slice(SLOT * source, SLOT * source + sum(one.nbytes for one in blocks_of(source, i)))
            assert same_bits(heaps.memory(rank)[part], expected[0][part]), f"round {i} from rank {source}"
            assert int(word[0]) == int(expected[0].view(torch.int64)[WORD // 8 + source])
            heaps.words(rank).store(source, i)
        dist.barrier()


@on_interpreted_ranks(1)
def test_odd_puts(rank: int, world: int) -> None:
    from odc.kernels import Signal, put

    memory, arrived = torch.zeros(256, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    table = torch.tensor([0, memory.data_ptr()])
    put([torch.arange(5, dtype=torch.uint8)], table, 1, 3)  # no signal; an odd place
    assert memory[3:8].tolist() == [0, 1, 2, 3, 4] and memory.count_nonzero() == 4
    put([torch.zeros(0)], table, 1, signal=Signal(8, 1, arrived))  # nothing is put: nothing is signalled
    assert not memory[8:].any()
    with pytest.raises(ValueError, match="none at byte 4"):
        put([torch.ones(1)], table, 1, signal=Signal(4, 1, arrived))
    with pytest.raises(ValueError, match="counted in an int32"):
        put([torch.ones(1)], table, 1, signal=Signal(8, 1, arrived.long()))
