"""What tests of the daemon share: waiting for it, and seeing what it did."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from odc.net.requests import ask
from odc.protocol import Word
from odc.runtime import Daemon
from support.members import F32, HeapGroup

LAYOUT = [[("w", 8, F32)]]


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether `holds()` becomes true in time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def settle(server: Daemon) -> None:
    """Return when the loop has handled all that had happened before."""
    for _ in range(2):
        ask(server.address, {"op": "status"}, 60.0)


def descriptors() -> set[str]:
    """Open in this process."""
    return set(os.listdir("/proc/self/fd"))


def aborts(group: HeapGroup) -> list[int]:
    """The word of each of three members: 0, or 1 + the culprit's rank."""
    return [group.layouts[member].peer(member).board.load(Word.ABORT) for member in range(3)]
