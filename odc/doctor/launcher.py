"""Probe of what started this process: a launcher, its ranks, what they lack, and devices it has hidden."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from odc import launchers
from odc.doctor.examination import Missing


def launcher(environment: Mapping[str, str] = os.environ) -> str:
    """The launcher with this process's rank; Missing where ranks cannot find each other, or map each other's memory."""
    launched = launchers.find(environment)
    if launched is None:
        return "none: odc train starts its own ranks"
    found = launched.describe()
    if launched.missing:
        raise Missing(found)
    if launched.local_world > 1 and (hidden := hidden_devices(environment, launched.local_world)):
        raise Missing(f"{found.removesuffix('; nothing missing')}; {hidden}")
    return found


def hidden_devices(
    environment: Mapping[str, str],
    ranks: int,
    folder: Path = Path("/dev"),
    refused: Callable[[Path], bool] | None = None,
) -> str:
    """Which devices of `ranks` on this host device cgroups keep this rank from, and the remedy; mostly empty.

    A rank maps its peers' memory by way of their devices, so it must be allowed to open all of theirs. Devices that
    CUDA_VISIBLE_DEVICES alone leaves out can be opened. `refused` says so of a device; None tries.
    """
    devices = [path for path in folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    opened = sum(not (refused or _is_refused)(device) for device in devices)
    allocated = environment.get("SLURM_GPUS_ON_NODE", "")
    theirs = int(allocated) if allocated.isdecimal() else min(len(devices), ranks)
    if opened >= theirs or opened == len(devices):
        return ""
    slurm = "SLURM_STEP_ID" in environment
    do = "srun --gpus-per-node or --gpu-bind=none, without --gpus-per-task" if slurm else "let each rank open all"
    return f"a rank may open {opened} of {theirs} GPUs, and cannot map its peers' memory: {do}"


def _is_refused(device: Path) -> bool:
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.EPERM  # of a device cgroup; EACCES would be the file's own mode
    return False
