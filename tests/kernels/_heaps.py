"""Heaps of several processes for tests of kernels: one region a rank, reached by a pointer table.

Chose real shared-memory heaps, attached through real doors, over one process's tensors: what a kernel reads and adds to
is memory that another process maps at another address and writes at the same time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from _groups import shm_group

from odc.memory import ShmHeap, Words

WORDS = 64


@dataclass
class Shared:
    """Every rank's region, as one rank sees it.

    Attributes:
        table: int64 [ranks]: address of each rank's region.
        word_table: int64 [ranks]: address of each rank's words.
    """

    heap: ShmHeap
    table: torch.Tensor
    word_table: torch.Tensor

    def memory(self, rank: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """1-D view of a rank's region."""
        return self.heap.tensor(rank, "region", dtype)

    def words(self, rank: int) -> Words:
        """A rank's words."""
        return self.heap.words(rank, "words")


@contextmanager
def shared(name: str, rank: int, world: int, nbytes: int) -> Iterator[Shared]:
    """Heaps of `world` ranks with a zeroed region of `nbytes` each; no rank leaves before all are at the end."""
    with shm_group(f"kernels-{name}", tuple(range(world)), rank, 60.0) as heap:
        heap.allocate("region", nbytes)
        heap.allocate("words", 8 * WORDS)
        heap.seal()
        bases = heap.base_addresses()
        yield Shared(heap, bases + heap.layout.offset("region"), bases + heap.layout.offset("words"))
        dist.barrier()


def skew(draw: random.Random) -> None:
    """Now and then a nap, so that ranks do not run in step."""
    if draw.random() < 0.3:
        time.sleep(draw.random() / 50)


def numbers(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """1-D, normal, the same for the same seed."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole_numbers(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """1-D, small whole numbers: their sums are exact in any order."""
    drawn = torch.randint(-8, 9, (numel,), generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit are equal."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
