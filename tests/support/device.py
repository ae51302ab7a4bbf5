"""What rank processes of the GPU tests do first."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from odc.memory import SymmetricHeap
from odc.memory.cuda import CudaHeap
from odc.memory.cuda_lanes import CudaLanes
from support.heaps import shm_group

#: Whether the device is an emulated one.
EMULATED = "libemulated_cuda" in os.environ.get("LD_PRELOAD", "")


@contextmanager
def no_waits() -> Iterator[None]:
    """Whatever waits for the device inside the block is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says of its mode that it is a prototype, which would be an error here
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def device_work(run: Callable[[], object]) -> tuple[list[str], list[str]]:
    """Names of the kernels that `run` launches, and of the copies and fills that it asks for, on the current device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    moves = [name for name in names if name.startswith(("Memcpy", "Memset"))]
    return [name for name in names if name not in moves], moves


def own_device(rank: int) -> torch.device:
    """The rank's device, made current."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextmanager
def cuda_group(identity: str, ranks: tuple[int, ...], me: int, deadline_s: float) -> Iterator[CudaHeap]:
    """The member's unsealed heap on its device; the words of its peers come through real listeners."""
    device = own_device(me)
    outer: list[SymmetricHeap] = []
    with shm_group(identity, ranks, me, deadline_s, outer) as host:
        heap = CudaHeap(host, device, CudaLanes(device))
        outer.append(heap)
        yield heap
        heap.close()
