"""What ranks announce of themselves in the job's store: their process and host, and why they end.

A rank announces its process when it first shards a module, or enters an evaluation, so that a peer that waits for it
sees the process end at once. Only ranks that see the same process ids (one host, one PID namespace) can see that.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence

from odc.errors import OdcError, aborted_by
from odc.memory import ProcessHandle
from odc.net.store import JobStore

_FAILED = "odc/failed"


def announce_process(store: JobStore, rank: int) -> None:
    """Store which process `rank` is, and on which host. Raises as a JobStore does."""
    store.set(_key(rank), json.dumps([os.getpid(), _namespace(), host_identity()]))


def process_of(store: JobStore, rank: int) -> ProcessHandle | None:
    """The process of `rank`; None if it has not published it, or cannot be seen from here. Raises as a JobStore does.

    The handle belongs to the store's connection, which keeps it for later callers.
    """
    known = store.processes.get(rank)
    if known is not None or rank in store.elsewhere or (found := store.find(_key(rank))) is None:
        return known
    pid, namespace, *_ = json.loads(found)
    if namespace != _namespace():
        store.elsewhere.add(rank)  # the answer stays: hundreds of ranks that wait for each other ask again and again
        return None
    handle = ProcessHandle(int(pid))
    kept = store.processes.setdefault(rank, handle)
    if kept is not handle:  # another thread was quicker
        handle.close()
    return kept


def has_ended(store: JobStore, rank: int) -> bool:
    """Whether the process of `rank` is seen to have ended; what it stored before is in the store. Raises as a JobStore
    does.
    """
    process = process_of(store, rank)
    return process is not None and not process.alive()


def find_hosts(store: JobStore, ranks: Sequence[int]) -> bool:
    """Add to `store.hosts` where `ranks` run, up to the first that has not announced it; whether any was added.

    Raises as a JobStore does.
    """
    found = store.find_leading([_key(rank) for rank in ranks])
    store.hosts.update({rank: _host_of(text) for rank, text in zip(ranks, found, strict=False)})
    return bool(found)


def await_host(store: JobStore, rank: int, late: str, check: Callable[[], object]) -> None:
    """Add to `store.hosts` where `rank` runs once it is announced; arguments and errors as of `JobStore.await_key`."""
    store.hosts[rank] = _host_of(store.await_key(_key(rank), late, culprit=rank, check=check))


def _host_of(announced: bytes) -> str:
    return str(json.loads(announced)[2])


def announce_failure(store: JobStore, reason: str, culprit: int) -> None:
    """Announce to ranks that have not attached yet why this process ends; does nothing if the store does not answer."""
    with contextlib.suppress(OdcError):
        # The first stays: later ones are mostly its consequence.
        store.compare_set(_FAILED, "", json.dumps([culprit, reason]))


def failure(store: JobStore) -> tuple[int, str] | None:
    """Culprit and reason that a rank of the job left by `announce_failure`. Raises as a JobStore does."""
    found = store.find(_FAILED)
    if found is None:
        return None
    culprit, reason = json.loads(found)
    return int(culprit), str(reason)


def refuse_failure(store: JobStore, doing: str) -> None:
    """Raise PeerLostError if a rank of the job left a reason by `announce_failure`. Raises as a JobStore does, too."""
    if (failed := failure(store)) is not None:
        raise aborted_by(doing, *failed)


def _key(rank: int) -> str:
    return f"odc/process/{rank}"


def host_identity() -> str:
    """Two processes with the same text can map each other's memory and watch each other: they share the boot, the
    network namespace (for the listeners) and the PID namespace. Containers that differ in one of these are hosts.
    """
    return "".join(place())


def place() -> tuple[str, str, str]:
    """The boot of this process's machine, and its PID and network namespaces, which are numbered within a boot; "" for
    what cannot be read.
    """
    boot = pids = network = ""
    with contextlib.suppress(OSError):
        network, pids = os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid")
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    return boot, pids, network


def _namespace() -> str:
    """Two processes with the same text see the same process ids."""
    boot, pids, _ = place()
    return boot + pids
