"""Probe of what started this process: a launcher, its ranks, what they lack, and devices it has hidden."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from odc import launchers
from odc.doctor.examination import Missing

_DRIVER = Path("/proc/driver/nvidia/gpus")


def launcher(environment: Mapping[str, str] = os.environ, gpus: Path = _DRIVER) -> str:
    """The launcher with this process's rank; Missing where ranks cannot find each other, or map each other's memory."""
    launched = launchers.find(environment)
    if launched is None:
        return "none: odc train starts its own ranks"
    found = launched.describe()
    if launched.missing:
        raise Missing(found)
    hidden = hidden_devices(launched, gpus)
    if hidden:
        raise Missing(f"{found.removesuffix('; nothing missing')}; {hidden}")
    return found


def hidden_devices(launched: launchers.Launched, gpus: Path = _DRIVER) -> str:
    """Which devices of the host a rank is kept from, where several ranks share it, and the remedy; mostly empty.

    A rank maps its peers' memory by way of their devices, so it must be allowed to open all of them.
    """
    there = sum(1 for _ in gpus.iterdir()) if gpus.is_dir() else 0
    if launched.local_world < 2 or there < 2:
        return ""
    import torch

    seen = torch.cuda.device_count()
    if not 0 < seen < min(there, launched.local_world):
        return ""
    slurm = launched.launcher == "srun"
    do = "srun --gpus-per-node or --gpu-bind=none, without --gpus-per-task" if slurm else "let each rank see all"
    return f"a rank sees {seen} of {there} devices, and cannot map its peers': {do}"
