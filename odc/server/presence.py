"""Saying who this rank is before it has a heap, so that a peer that waits for the heap can see the rank die.

Chose a process id in the job's store, written when a module is sharded, over a first connection between daemons:
nobody has to be reached, and a pidfd on the id tells of a death at once. Only ranks that see the same process ids (one
host, one PID namespace) use it; for others the deadline remains.
"""

from __future__ import annotations

import json
import os
from typing import Protocol

from odc.memory import ProcessHandle


class Store(Protocol):
    """What is needed of `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value that is there."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""
        ...


def announce_process(store: Store, rank: int) -> None:
    """Store which process `rank` is."""
    store.set(_key(rank), json.dumps([os.getpid(), _namespace()]))


def process_of(store: Store, rank: int) -> ProcessHandle | None:
    """The process of `rank`, to be closed by the caller; None if it has not said, or cannot be seen from here."""
    if not store.check([_key(rank)]):
        return None
    pid, namespace = json.loads(store.get(_key(rank)))
    return ProcessHandle(int(pid)) if namespace == _namespace() else None


def _key(rank: int) -> str:
    return f"odc/process/{rank}"


def _namespace() -> str:
    """Two processes with the same text see the same process ids."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
