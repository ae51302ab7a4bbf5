"""Heaps of several processes for tests of kernels: one region a rank, reached by a pointer table.

Real shared-memory heaps are attached through real listeners: what a kernel reads and adds to
is memory that another process maps at another address and writes at the same time. Where torch's default device is a
CUDA device (`tests/gpu/test_kernels.py`), the same functions work on CUDA heaps: all of it lies on the device then.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from odc.memory import SymmetricHeap, Words
from support.heaps import shm_group

WORDS = 64


@dataclass
class Shared:
    """Every rank's region, as one rank sees it.

    Attributes:
        table: int64 [ranks]: address of each rank's region.
    """

    heap: SymmetricHeap
    table: torch.Tensor

    def memory(self, rank: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """1-D view of a rank's region."""
        return self.heap.tensor(rank, "region", dtype)

    def words(self, rank: int) -> Words | DeviceWords:
        """A rank's words."""
        if self.heap.device.type == "cpu":
            return self.heap.words(rank, "words")
        return DeviceWords(self.heap.tensor(rank, "words", torch.int64))


class DeviceWords:
    """Words on a device, looked at and set by copies; nothing here is atomic."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    def load(self, i: int) -> int:
        return int(self._memory[i])

    def store(self, i: int, value: int) -> None:
        self._memory[i] = value
        torch.cuda.synchronize()


@contextmanager
def shared(name: str, rank: int, world: int, nbytes: int) -> Iterator[Shared]:
    """Heaps of `world` ranks with a zeroed region of `nbytes` each; no rank leaves before all are at the end."""
    identity = f"kernels-{os.getppid()}-{name}"  # ranks of one pool have one parent, those of another run another
    with _group()(identity, tuple(range(world)), rank, 60.0) as heap:
        heap.allocate("region", nbytes)
        heap.allocate("words", 8 * WORDS)
        heap.seal()
        addresses = [heap.address(member, "region") for member in range(world)]
        yield Shared(heap, torch.tensor(addresses, dtype=torch.int64, device=heap.device))
        dist.barrier()


def _group() -> Callable[..., AbstractContextManager[SymmetricHeap]]:
    if torch.get_default_device().type == "cpu":
        return shm_group
    from support.device import cuda_group  # of tests/gpu

    return cuda_group


def skew(draw: random.Random) -> None:
    """Sleep now and then, so that ranks do not run in step."""
    if draw.random() < 0.3:
        time.sleep(draw.random() / 50)


def failures_of_threads(count: int, work: Callable[[int], None], timeout_s: float) -> list[str]:
    """What went wrong in `count` threads, each of which runs `work` on its number."""
    wrong: list[str] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            wrong.append(f"thread {number}: {error!r}")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    return wrong + [f"thread {number} hangs" for number, thread in enumerate(threads) if thread.is_alive()]


def numbers(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """1-D, normal, the same for the same seed."""
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(dtype).to(torch.get_default_device())


def whole_numbers(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """1-D, small whole numbers: their sums are exact in any order."""
    drawn = torch.randint(-8, 9, (numel,), generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(dtype).to(torch.get_default_device())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit are equal."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
