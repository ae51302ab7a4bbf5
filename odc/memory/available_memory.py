"""How much memory this process may still take.

Shared memory is handed out page by page, so a heap that does not fit would otherwise end in the OOM killer or SIGBUS in
the middle of training. The answer is a snapshot; `ShmHeap` asks again while it prefaults.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Names of a group's limit, its usage, and the page cache that the kernel drops before it refuses memory.
_V2_FILES = "memory.max", "memory.current", "inactive_file"
_V1_FILES = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
_V1_UNLIMITED = 1 << 62  # in cgroup v1 "no limit" is a number near 2^63


@dataclass(frozen=True)
class FreeMemory:
    """Bytes that can still be taken, and what limits them (text for messages)."""

    nbytes: int
    limited_by: str


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> FreeMemory:
    """The least that the machine and each control group above this process leave. Reads files, never raises."""
    found = [_machine(proc), *_groups(proc, cgroups)]
    known = [free for free in found if free is not None]
    return min(known, key=lambda free: free.nbytes, default=FreeMemory(1 << 62, "nothing that could be read"))


def _machine(proc: Path) -> FreeMemory | None:
    for line in read_text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return FreeMemory(int(line.split()[1]) << 10, "the machine (MemAvailable)")
    return None


def _groups(proc: Path, cgroups: Path) -> Iterator[FreeMemory | None]:
    for controllers, path in memberships(proc):
        if controllers == "":
            roots, files = [cgroups, cgroups / "unified"], _V2_FILES
        elif "memory" in controllers.split(","):
            roots, files = [cgroups / "memory"], _V1_FILES
        else:
            continue
        yield from (_group(folder, *files) for root in roots for folder in upwards(root, path))


def memberships(proc: Path) -> list[tuple[str, str]]:
    """(controllers, path) of each control group of this process; no controllers are named in cgroup v2."""
    rows = [line.split(":", 2) for line in read_text(proc / "self" / "cgroup").splitlines()]
    return [(row[1], row[2]) for row in rows if len(row) == 3]


def upwards(root: Path, path: str) -> list[Path]:
    """The group and all groups above it. Inside a container only the root may be visible, and then only it counts."""
    folder = root / path.lstrip("/")
    return [folder, *(above for above in folder.parents if above == root or root in above.parents)]


def _group(folder: Path, limit_file: str, usage_file: str, reclaimable: str) -> FreeMemory | None:
    limit, usage = read_text(folder / limit_file).strip(), read_text(folder / usage_file).strip()
    if not limit.isdecimal() or not usage.isdecimal() or int(limit) > _V1_UNLIMITED:
        return None
    cached = 0
    for line in read_text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == reclaimable:
            cached = int(value)
    return FreeMemory(max(0, int(limit) - int(usage) + cached), f"control group {folder}")


def read_text(path: Path) -> str:
    """The text of a file of the kernel's; empty where it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
