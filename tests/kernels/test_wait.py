"""wait, interpreted: what a process wrote before its signal is there for whoever has waited; no wait is endless."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.kernel_heaps import numbers, same_bits, shared, skew
from support.ranks import RankPool

Pools = Callable[[int], RankPool]
F32 = torch.float32


def passes_the_baton(rank: int, world: int) -> None:
    """Epoch after epoch: publish, signal all; wait for each, read. By kernels alone, ranks ahead of each other."""
    from odc.kernels import get, publish, signal, wait

    draw = random.Random(rank)
    with shared(f"wait-{world}", rank, world, 4096) as heaps:
        dist.barrier()
        for epoch in range(1, 7):
            skew(draw)
            publish([heaps.memory(rank, F32)[:300]], [numbers(10 * rank + epoch, 300, F32)])
            signal(heaps.word_table, rank, 0, epoch)
            for peer in draw.sample(range(world), world):
                seen = wait(heaps.word_table, peer, 0, epoch, f"rank {peer} to publish", timeout_s=60, looks=20)
                assert seen == epoch, f"rank {peer} published epoch {seen} before rank {rank} had read epoch {epoch}"
                out = torch.empty(300)
                get(out, heaps.table, peer)
                assert same_bits(out, numbers(10 * peer + epoch, 300, F32)), f"epoch {epoch} of rank {peer}"
            signal(heaps.word_table, rank, 8, epoch)  # done reading
            for peer in range(world):
                wait(heaps.word_table, peer, 8, epoch, f"rank {peer} to read", timeout_s=60, looks=20)


def gives_up_at_the_deadline(rank: int, world: int) -> None:
    from odc.errors import PeerLostError, WaitTimeoutError
    from odc.kernels import poll, wait, wait_reference

    words = torch.tensor([5, 0])
    table, seen = torch.tensor([words.data_ptr()]), torch.zeros(1, dtype=torch.int64)
    poll(table, 0, 0, 7, seen, looks=3)
    assert int(seen) == 5 and words.tolist() == [5, 0]
    assert wait(table, 0, 0, 5, "nothing", timeout_s=1) == 5
    for waiting in (
        lambda: wait(table, 0, 8, 1, "rank 3: rank 7 to publish", timeout_s=0.1, looks=5),
        lambda: wait_reference([words.view(torch.uint8)], 0, 8, 1, "rank 3: rank 7 to publish", timeout_s=0.1),
    ):
        with pytest.raises(WaitTimeoutError, match=r"rank 3: rank 7 to publish: 0 of 1 after 0\.1 s"):
            waiting()

    def dead() -> None:
        raise PeerLostError("rank 7 died", culprit=7)

    with pytest.raises(PeerLostError, match="rank 7 died"):
        wait(table, 0, 8, 1, "rank 7 to publish", timeout_s=60, looks=5, check=dead)
    with pytest.raises(ValueError, match="at least once"):
        poll(table, 0, 8, 1, seen, looks=0)


def lets_other_threads_launch(rank: int, world: int) -> None:
    """A thread waits for a word that another thread of the same process sets, by a kernel, later."""
    from odc.kernels import signal, wait

    words = torch.zeros(2, dtype=torch.int64)
    table, found = torch.tensor([words.data_ptr()]), list[int]()
    waiting = threading.Thread(target=lambda: found.append(wait(table, 0, 8, 9, "a word", timeout_s=60)))
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive(), "it waits for nothing"
    signal(table, 0, 8, 9)
    waiting.join(60.0)
    assert found == [9]


@pytest.mark.parametrize("world", [2, 3])
def test_what_was_written_before_a_signal_is_there(interpreted: Pools, world: int) -> None:
    interpreted(world).run(passes_the_baton)


def test_gives_up_at_the_deadline(interpreted: Pools) -> None:
    interpreted(1).run(gives_up_at_the_deadline)


def test_lets_other_threads_launch(interpreted: Pools) -> None:
    interpreted(1).run(lets_other_threads_launch)
