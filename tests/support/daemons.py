"""What tests of the daemon share: waiting for its loop, and what it did."""

from __future__ import annotations

import os

from odc.net.requests import ask
from odc.protocol import Word
from odc.runtime import Daemon
from support.members import F32, HeapGroup

LAYOUT = [[("w", 8, F32)]]


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
