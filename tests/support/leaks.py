"""What rank processes left behind: processes, shared-memory files, memfds.

Each rank opens a session of its own, and what it started is recognised by that session: a killed rank's children are
re-parented, so a search by parent would miss them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Collection
from pathlib import Path

from support.waiting import until


def shared_files() -> set[str]:
    """Names in /dev/shm."""
    return set(os.listdir("/dev/shm"))


def processes_of(sessions: Collection[int]) -> dict[int, str]:
    """Living processes (zombies aside) in any of the sessions: pid to command."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        # The command, in parentheses, may hold spaces: fields are counted from the last parenthesis.
        state, _, _, session = stat[stat.rindex(")") + 2 :].split()[:4]
        if int(session) in sessions and state not in "ZX":
            found[int(entry.name)] = stat[stat.index("(") + 1 : stat.rindex(")")]
    return found


def memfds_of(pid: int) -> list[str]:
    """Anonymous shared files that a process has open or mapped."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("/memfd:"):
            found.append(target)
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return found + [line.split(maxsplit=5)[5] for line in maps if "/memfd:" in line]


def memfd_inodes() -> set[str]:
    """Inode numbers of the anonymous shared files that this process has open or mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = {line.split(maxsplit=5)[4] for line in lines if "/memfd:" in line}
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(fd).startswith("/memfd:"):
                found.add(str(fd.stat().st_ino))
    return found


def assert_nothing_left(
    sessions: Collection[int], files_before: set[str], memfds_before: Collection[str] = (), within_s: float = 60.0
) -> None:
    """No process of these ranks lives, and no file in /dev/shm is new that bears odc's name or one of their pids.

    A memfd lives in processes alone: with these gone it could only be open in pytest itself, which is looked at too.

    Args:
        within_s: DataLoader workers look for their parent every 5 s.
    """
    until(
        lambda: not processes_of(sessions),
        lambda: f"the end of ranks: processes live on: {processes_of(sessions)}",
        within_s,
    )
    marks = re.compile("|".join(["odc", *(rf"(?<!\d){pid}(?!\d)" for pid in sessions)]))
    left = [name for name in shared_files() - files_before if marks.search(name)]
    assert not left, f"left in /dev/shm: {left}"

    # A mapping lives as long as the last tensor on it; heaps of earlier tests may still wait for the cycle collector.
    # A thread that is about to end may hold one too.
    def held() -> list[str]:
        gc.collect()
        return [name for name in memfds_of(os.getpid()) if name not in memfds_before]

    until(lambda: not held(), lambda: f"the end of memfds of pytest itself: {held()}")
