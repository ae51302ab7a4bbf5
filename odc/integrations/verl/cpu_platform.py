"""verl's platform "cpu": its engines and trainers run without an accelerator when VERL_PLATFORM=cpu.

The platform is never detected automatically: a driver without an accelerator must still find the cluster's. Memory
figures are 0, and there is nothing to profile and no IPC.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*args: Any, **kwargs: Any) -> None:
    return


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


# What verl calls on `torch.<device>`; torch.cpu has only half of it.
_DEVICE = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__},
    **dict.fromkeys(
        ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_per_process_memory_fraction"), _nothing
    ),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), _zero),
    mem_get_info=lambda *unused: (0, 0),
    get_device_name=lambda *unused: "cpu",
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """Every process has one device, "cpu"; process groups use gloo."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> str:
        return "cpu"  # verl moves tensors `.to(current_device())`; an index would mean CUDA

    def device_count(self) -> int:
        return 1

    # There is one device, no cache, no allocator and no profiler of its own, and nothing runs asynchronously.
    set_device = synchronize = set_allocator_settings = empty_cache = staticmethod(_nothing)
    profiler_start = profiler_stop = cudart = staticmethod(_nothing)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "ODC_VISIBLE_CPUS"  # verl sets it for its workers; nothing reads it

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    # verl asks Ray for this resource and its ids, and Ray refuses "CPU"; users declare one for each rank.
    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False
