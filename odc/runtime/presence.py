"""What a rank says of itself in the job's store: which process it is, and why it has ended.

A rank says which process it is when it first shards a module, long before it has a heap, so that a peer that waits for
the heap sees the process end at once (by a pidfd). Only ranks that see the same process ids (one host, one PID
namespace) can look; for the others the deadline of the wait remains.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Protocol

from odc.errors import OdcError
from odc.memory import ProcessHandle
from odc.runtime.store import JobStore

_FAILED = "odc/failed"


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


def announce_process(store: JobStore, rank: int) -> None:
    """Store which process `rank` is. Raises as a JobStore does."""
    store.set(_key(rank), json.dumps([os.getpid(), _namespace()]))


def process_of(store: JobStore, rank: int) -> ProcessHandle | None:
    """The process of `rank`; None if it has not said, or cannot be seen from here. Raises as a JobStore does.

    The handle belongs to the store's connection, which keeps it for the next who asks.
    """
    known = store.processes.get(rank)
    if known is not None or not store.check([_key(rank)]):
        return known
    pid, namespace = json.loads(store.get(_key(rank)))
    if namespace != _namespace():
        return None
    handle = ProcessHandle(int(pid))
    kept = store.processes.setdefault(rank, handle)
    if kept is not handle:  # another thread was quicker
        handle.close()
    return kept


def announce_failure(store: JobStore, reason: str, culprit: int) -> None:
    """Leave for ranks that have not attached yet why this process ends; does nothing if the store does not answer."""
    with contextlib.suppress(OdcError):
        if not store.check([_FAILED]):  # the first stays: later ones are mostly its consequence
            store.set(_FAILED, json.dumps([culprit, reason]))


def failure(store: JobStore) -> tuple[int, str] | None:
    """Culprit and reason that a rank of the job left by `announce_failure`. Raises as a JobStore does."""
    if not store.check([_FAILED]):
        return None
    culprit, reason = json.loads(store.get(_FAILED))
    return int(culprit), str(reason)


def _key(rank: int) -> str:
    return f"odc/process/{rank}"


def _namespace() -> str:
    """Two processes with the same text see the same process ids."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
