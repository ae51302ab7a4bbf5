"""How many cores this process has: those that it may run on, or as many as its control groups give it time for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from odc.memory.available_memory import memberships, read_text, upwards


def cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """The least of the affinity and of each quota of processor time above this process. Reads files, never raises."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas(proc, cgroups)])


def _quotas(proc: Path, cgroups: Path) -> Iterator[float]:
    for controllers, path in memberships(proc):
        if controllers == "":
            for folder in (above for root in (cgroups, cgroups / "unified") for above in upwards(root, path)):
                yield from _ratio(*read_text(folder / "cpu.max").split()[:2])
        elif "cpu" in controllers.split(","):
            for folder in upwards(cgroups / "cpu", path):
                yield from _ratio(read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us"))


def _ratio(quota: str = "", period: str = "") -> Iterator[float]:
    """Time a period; nothing where there is no limit, which is "max", or -1 in cgroup v1."""
    if quota.strip().isdecimal() and period.strip().isdecimal():
        yield int(quota) / int(period)
