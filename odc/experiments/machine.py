"""What a measurement was made on, as facts that can be published: no host or user names."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from odc.experiments.config import cores


def machine() -> dict[str, str | int]:
    """Processor, cores that may be used, memory in bytes, system."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
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
    for package in ("odc-fsdp", "transformers", "tokenizers", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
