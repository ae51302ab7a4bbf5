"""Whether ranks of a host find cores: of those that they may run on, and by the time that control groups give them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from odc.memory.available_memory import memberships, read_text, upwards


def enough_cores(
    each: int, processes: Sequence[int], proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> bool:
    """Whether there are `each` cores for this process and for every other one that may run on some of the same.

    `processes` are ids on this host, this process's among them. A quota of processor time above this process is one for
    all of them; a process whose cores cannot be asked for has this one's. Reads files, never raises.
    """
    here = os.sched_getaffinity(0)
    sharing = sum(not here.isdisjoint(_affinity(process, here)) for process in processes)
    return each * sharing <= len(here) and all(each * len(processes) <= quota for quota in _quotas(proc, cgroups))


def _affinity(process: int, otherwise: set[int]) -> set[int]:
    try:
        return os.sched_getaffinity(process)
    except OSError:  # it has ended
        return otherwise


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
