"""What a measurement was made on, as facts that can be published: no host or user names."""

from __future__ import annotations

import platform
from pathlib import Path

from odc.experiments.config import cores
from odc.provenance import memory_bytes, processor, versions_of


def machine() -> dict[str, str | int]:
    """Processor, cores that may be used, memory in bytes, system."""
    return {
        "processor": processor(),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
    }


def processor_times() -> tuple[int, int] | None:
    """(stolen, all) ticks of all cores since boot; None where the kernel does not count them."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()
        return int(first[8]), sum(int(ticks) for ticks in first[1:9])
    except (OSError, IndexError, ValueError):
        return None


def steal(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """Share of the cores' time between two calls of `processor_times` that a virtual machine's host gave to others."""
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])


def versions() -> dict[str, str]:
    """Of Python and of the packages that a run's figures depend on; torch's names its build (cpu, cu130)."""
    import torch

    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return found | versions_of(("odc-fsdp", "transformers", "tokenizers", "numpy"))
