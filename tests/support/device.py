"""What rank processes of the GPU tests do first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from odc.memory.cuda import CudaHeap, CudaLanes
from support.groups import shm_group


def own_device(rank: int) -> torch.device:
    """The rank's device, made current."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextmanager
def cuda_group(identity: str, ranks: tuple[int, ...], me: int, deadline_s: float) -> Iterator[CudaHeap]:
    """The member's unsealed heap on its device; the words of its peers come through real listeners."""
    device = own_device(me)
    with shm_group(identity, ranks, me, deadline_s) as host:
        heap = CudaHeap(host, device, CudaLanes(device), dist.group.WORLD, dist.barrier)
        yield heap
        heap.close()
