"""Where a job computes, on this machine's cores or on its CUDA devices, and how much memory a rank holds there.

Ranks may share a CUDA device. NCCL refuses that, so arms of torch's collectives then cannot run.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist

from odc.arms import ArmName, arm_named
from odc.errors import ConfigError, UnsupportedError
from odc.experiments.config import JobConfig
from odc.fsdp import live_roots
from odc.trace import CAPACITY, DeviceClock

_CPU = torch.device("cpu")
_STATUS = Path("/proc/self/status")
_ROLLUP = Path("/proc/self/smaps_rollup")


def check_device(config: JobConfig, arm: ArmName) -> None:
    """Checks, before ranks start, that `arm` can run on `config.device` of this machine.

    Raises UnsupportedError without a CUDA device, and ConfigError if the arm's collectives, or those of an export, need
    a device a rank and there are fewer.
    """
    if config.device == "cpu":
        return
    if not torch.cuda.is_available():
        raise UnsupportedError("device: no CUDA device here (`odc doctor --need cuda` says what is missing)")
    devices, ranks = torch.cuda.device_count(), ranks_here(config.ranks)
    here = f"{devices} here"
    if devices == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        here += " (a launcher that shows each process one of several, by CUDA_VISIBLE_DEVICES, must show it all)"
    if ranks > devices and config.export is not None:
        raise ConfigError(
            f"export: a whole model is gathered by NCCL, which needs a CUDA device a rank; {ranks} ranks share "
            f"{here}. Save checkpoints (--output), and export on the CPU (--resume, without --device)"
        )
    if ranks > devices and not arm_named(arm).on_demand:
        raise ConfigError(
            f"device: arm {arm} uses NCCL, which needs a CUDA device a rank; {ranks} ranks share {here}. "
            f"Take --ranks {devices}, or only arms that share devices (odc and all odc-*)"
        )


def ranks_here(ranks: int) -> int:
    """How many of a job's ranks are on this host, by torchrun's environment; all without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def backend(device: str, ranks: int) -> str:
    """The process group's: gloo for host memory, and NCCL for devices if each rank has its own."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" and ranks_here(ranks) <= torch.cuda.device_count() else "gloo"


def take_device(device: str) -> torch.device:
    """This rank's device, made current; in the environment of `torchrun`, once the process group is there."""
    if device == "cpu":
        return _CPU
    devices = torch.cuda.device_count()
    local = os.environ.get("LOCAL_RANK")  # torchrun's and torch elastic's
    taken = torch.device("cuda", (int(local) if local is not None else dist.get_rank()) % devices)
    torch.cuda.set_device(taken)
    return taken


def device_names() -> list[str]:
    """Names of this machine's CUDA devices."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def settle(device: torch.device) -> None:
    """Waits until the device has done the work that was queued, so that a span that ends now includes it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def device_clock(device: torch.device) -> DeviceClock | None:
    """Times spans by this rank's compute stream, the current one; None on the processor, whose own clock does."""
    if device.type != "cuda":
        return None
    return DeviceClock(
        lambda: torch.cuda.Event(enable_timing=True), torch.cuda.current_stream(device), most=2 * CAPACITY
    )


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception of a microbatch means that memory ran out, on the device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)  # torch has no type of its own there


def trim() -> None:
    """Gives memory that the C library holds but does not use back to the system. Milliseconds; no-op without glibc."""
    trimmer = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trimmer is not None:
        trimmer(0)


def held_bytes(device: torch.device = _CPU) -> int:
    """Bytes held now: on the host resident pages as Linux counts them, shared ones divided among the processes that map
    them; on a device torch's tensors and odc's heaps, without CUDA's own memory.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) + _heaps()
    return _field(_ROLLUP.read_text(), "Pss")


def reset_peak(device: torch.device = _CPU) -> None:
    """Starts a new peak from what is held now. OSError where the system forbids it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device = _CPU) -> int:
    """Most bytes held at once since `reset_peak`, counted as `held_bytes` does.

    On the host pages that are shared, as libraries and heaps are, count as they are divided now: the kernel keeps a
    peak of whole pages alone. Heaps are mapped whole and never grow.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + _heaps()
    now = _ROLLUP.read_text()
    return _field(_STATUS.read_text(), "VmHWM") - _field(now, "Rss") + _field(now, "Pss")


def _heaps() -> int:
    return sum(root.layout.heap.layout.nbytes for root in live_roots())


def _field(lines: str, name: str) -> int:
    """Bytes, of a file in /proc."""
    found = re.search(rf"^{name}:\s+(\d+) kB", lines, re.MULTILINE)
    if found is None:
        raise OSError(f"this kernel says no {name} of a process")
    return int(found.group(1)) * 1024
