"""How much memory a rank really uses: of the host as Linux counts it, of a CUDA device what torch and odc hold there.

Chose resident pages as the kernel sees them over adding up tensors: it also holds what libraries, buffers and the heap
take. Pages that ranks share (the heap is mapped by every peer) are divided among those that map them, or two ranks
would count them twice. The cost is that memory the C library has freed but kept counts too, up to `trim`. On a device
ranks may share memory with others, so there tensors are added up: torch's allocator's, and odc's heaps beside it. What
CUDA, its libraries and NCCL take for themselves is left out.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

_CPU = torch.device("cpu")
_STATUS = Path("/proc/self/status")
_ROLLUP = Path("/proc/self/smaps_rollup")


def trim() -> None:
    """Gives memory that the C library holds but does not use back to the system. Milliseconds; no-op without glibc."""
    trimmer = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trimmer is not None:
        trimmer(0)


def held_bytes(device: torch.device = _CPU) -> int:
    """Bytes held now: resident, shared pages divided among the processes that map them; or on a CUDA device."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) + _heaps()
    return _field(_ROLLUP, "Pss")


def reset_peak(device: torch.device = _CPU) -> None:
    """Starts a new peak from what is held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device = _CPU) -> int:
    """Most bytes held at once since `reset_peak`, counted as by `held_bytes`.

    Heaps are taken as they are now: they are mapped whole and never grow.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + _heaps()
    return _field(_STATUS, "VmHWM") - _field(_STATUS, "RssShmem") + _field(_ROLLUP, "Pss_Shmem")


def _heaps() -> int:
    """Bytes on the device of this process's heaps; torch's allocator does not count them."""
    from odc.fsdp import live_roots

    return sum(root.layout.heap.layout.nbytes for root in live_roots())


def _field(path: Path, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{path} has no {name}")
    return int(found.group(1)) * 1024
