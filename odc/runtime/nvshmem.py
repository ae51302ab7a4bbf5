"""NVSHMEM of a job: its start at the first need, the places of models in its memory, its end.

The library's collectives have no deadline, and once a rank is inside one nothing ends it but the rank's process. So
ranks wait for each other in the job's store before each, where every wait has a deadline and names the late rank. One
word there decides for all of them that they go on, or that none does.

Keys, all under `odc/nvshmem/N` at the N-th start in the job: `need/R`, `ready/R` and `end/R` (what rank R brings
along), `need`, `ready` and `end` (its outcome), `id`, and `pieces`: where each heap lies in the slabs.
"""

from __future__ import annotations

import functools
import json
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from odc.deadlines import NVSHMEM_END_S, STORE_ENDING_S, STORE_LEAST_S, Deadline
from odc.errors import (
    HeapMemoryError,
    LayoutMismatchError,
    OdcError,
    PeerLostError,
    UnsupportedError,
    aborted_by,
    culprit_of,
)
from odc.memory import nvshmem
from odc.memory.nvshmem import Library, SlabPiece
from odc.net.announced import has_ended, host_identity, refuse_failure
from odc.net.store import JobStore
from odc.net.tcp import interface_of, own_address
from odc.runtime.daemon import process_status, refuse_losses
from odc.settings import Settings

_ALL = "all have come"
_MIB = 1 << 20


@dataclass
class _Job:
    """The job for which this process has started NVSHMEM.

    `kept`: the user may hold tensors in the memory of a model that was shut down.
    """

    library: Library
    store: weakref.ref[Any]  # which must end with its process group
    prefix: str
    pid: int
    kept: bool = False


_job: _Job | None = None
_ends: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of NVSHMEM, by store: all ranks count alike


class AllRanks:
    """Ranks 0 to `ranks` - 1 of the job, which gather once under the key `name`. On the main thread."""

    def __init__(self, store: JobStore, name: str, ranks: int, rank: int) -> None:
        self._store, self._name, self._ranks, self._rank = store, name, ranks, rank
        self._doing = ""

    def gather(self, value: str, doing: str) -> list[bytes]:
        """What all ranks bring, if all of them come.

        Otherwise every rank raises the same: WaitTimeoutError for a rank that did not come within the store's timeout,
        PeerLostError for one whose process has ended, or which has left the reason of its end. `doing` is for these.
        """
        self._doing = f"rank {self._rank}, waiting for all {self._ranks} ranks of the job to {doing}"
        self._store.set(f"{self._name}/{self._rank}", value)
        deadline = Deadline(self._store.timeout_s)
        try:
            found = [self._await(peer, deadline) for peer in range(self._ranks)]
        except OdcError as error:
            if self.decide(json.dumps([culprit_of(error, self._rank), str(error)])) != _ALL:
                raise
            found = [self._store.get(f"{self._name}/{peer}") for peer in range(self._ranks)]
        else:
            if (outcome := self.decide(_ALL)) != _ALL:
                raise self._refused(outcome)
        return found

    def decide(self, outcome: str) -> str:
        """The outcome for all ranks, which is that of the first to call this. Only `_ALL` lets them go on."""
        return self._store.compare_set(self._name, "", outcome).decode()

    def _await(self, peer: int, deadline: Deadline) -> bytes:
        late = f"{self._doing}: rank {peer} has not in {self._store.timeout_s:g} s"
        key, left = f"{self._name}/{peer}", max(0.0, deadline.remaining())
        check = functools.partial(self._check, peer, key)
        return self._store.await_key(key, late, culprit=peer, check=check, timeout_s=left)

    def _check(self, peer: int, key: str) -> None:
        if (outcome := self._store.find(self._name)) is not None and outcome.decode() != _ALL:
            raise self._refused(outcome.decode())
        refuse_failure(self._store, self._doing)
        if has_ended(self._store, peer) and self._store.find(key) is None:
            raise PeerLostError(f"{self._doing}: the process of rank {peer} has ended", culprit=peer)

    def _refused(self, outcome: str) -> PeerLostError:
        culprit, reason = json.loads(outcome)
        return aborted_by(self._doing, culprit, reason)


def placer(
    store: Any, identity: str, members: tuple[int, ...], settings: Settings, rank: int, ranks: int, device: torch.device
) -> Callable[[int], tuple[Library, int]]:
    """For `NvshmemHeap`: starts NVSHMEM for the job of `ranks` ranks if this root is the first to be run here, and
    gives the root `identity`, of the ranks `members`, its place. `store` is torch's.
    """

    def place(nbytes: int) -> tuple[Library, int]:
        watch = functools.partial(refuse_losses, f"rank {rank}, finding a place for heap {identity}")
        patient = JobStore(store, max(STORE_LEAST_S, settings.timeout_s), rank, watch=watch)
        job = _start(store, patient, settings, rank, ranks, device, nbytes)
        job.kept = job.kept or settings.gradient_views
        return job.library, _place(patient, job, identity, members, nbytes).offset

    return place


def _start(
    store: Any, patient: JobStore, settings: Settings, rank: int, ranks: int, device: torch.device, nbytes: int
) -> _Job:
    global _job
    if _job is not None:
        if _job.store() is not store or _job.pid != os.getpid():
            raise UnsupportedError(
                f"rank {rank}: this process has used NVSHMEM in another job, and cannot start it again; start a process"
            )
        return _job
    if "recovery" in process_status:
        raise UnsupportedError(
            f"rank {rank}: Settings(memory='nvshmem') with odc.Recovery: NVSHMEM cannot replace a rank, nor go on "
            "without one; use memory='driver'"
        )
    nvshmem.core()
    prefix = f"odc/nvshmem/{_ends.get(store, 0)}"
    needed = nvshmem.slab_bytes(max(nbytes, settings.nvshmem_bytes))
    here = json.dumps([needed, host_identity()])
    doing = "run their first model, at which NVSHMEM starts on all of them"
    found = [json.loads(one) for one in AllRanks(patient, f"{prefix}/need", ranks, rank).gather(here, doing)]
    size, over_hosts = max(one[0] for one in found), len({one[1] for one in found}) > 1
    # Whatever can fail on one rank alone fails here, before the collectives.
    interface = interface_of(own_address(store, settings.address)) if over_hosts else None
    nvshmem.set_environment(size, interface, rank)
    _require_free(rank, device, size)
    if rank == 0:
        patient.set(f"{prefix}/id", nvshmem.make_id().hex())
    AllRanks(patient, f"{prefix}/ready", ranks, rank).gather("", "be ready to start NVSHMEM")
    uid = bytes.fromhex(patient.get(f"{prefix}/id").decode())
    library = Library(uid, rank, ranks, device, size)
    _job = _Job(library, weakref.ref(store), prefix, os.getpid())
    return _job


def _require_free(rank: int, device: torch.device, nbytes: int) -> None:
    if torch.cuda.mem_get_info(device)[0] < nbytes:
        torch.cuda.empty_cache()
    if (free := torch.cuda.mem_get_info(device)[0]) < nbytes:
        raise HeapMemoryError(
            f"rank {rank}: NVSHMEM is to allocate {nbytes / _MIB:.1f} MiB of {device}, which has {free / _MIB:.1f} MiB "
            "free; use more ranks, a smaller model or smaller staging blocks"
        )


def _place(store: JobStore, job: _Job, identity: str, members: tuple[int, ...], nbytes: int) -> SlabPiece:
    """Where the root lies in the slab, on all its ranks: wherever the first of them has put it. Waits for no rank."""
    library, key, table = job.library, f"{job.prefix}/pieces", ""
    while True:
        pieces = {
            name: SlabPiece(at, size, tuple(some)) for name, (at, size, some) in json.loads(table or "{}").items()
        }
        if (piece := pieces.get(identity)) is not None:
            break
        piece = nvshmem.place_piece(list(pieces.values()), nbytes, members, library.nbytes)
        if piece is None:
            raise _full(identity, nbytes, pieces, library)
        pieces[identity] = piece
        wanted = json.dumps({name: [one.offset, one.nbytes, list(one.ranks)] for name, one in pieces.items()})
        table = store.compare_set(key, table, wanted).decode()
        if table == wanted:
            break
    if piece.nbytes != nvshmem.slab_bytes(nbytes):
        raise LayoutMismatchError(
            f"rank {library.rank}: heap {identity} takes {nbytes} bytes here, and {piece.nbytes} on another rank: "
            "every rank must shard the same modules, with the same settings"
        )
    return piece


def _full(identity: str, nbytes: int, pieces: dict[str, SlabPiece], library: Library) -> HeapMemoryError:
    taken = max(one.offset + one.nbytes for one in (*pieces.values(), SlabPiece(0, 0, ())))
    enough = taken + nvshmem.slab_bytes(nbytes)
    return HeapMemoryError(
        f"rank {library.rank}: heap {identity} needs {nbytes / _MIB:.1f} MiB of NVSHMEM's memory, of which "
        f"{(library.nbytes - taken) / _MIB:.1f} of {library.nbytes / _MIB:.1f} MiB are left: it is allocated once, "
        f"when the first model runs; set Settings(nvshmem_bytes=...) of that to {enough} or more"
    )


def end_nvshmem(failed: bool) -> None:
    """End NVSHMEM together with all ranks of the job, as this rank is shut down.

    Where a rank has `failed`, does not come soon, or may have gradients in its memory (`gradient_views`), no rank ends
    it: the memory then stays until the process ends, and nothing else is lost.
    """
    global _job
    if _job is None or _job.pid != os.getpid():
        return
    library, store, kept, name = _job.library, _job.store(), _job.kept, f"{_job.prefix}/end"
    if store is None:
        return
    try:
        job = JobStore(store, STORE_ENDING_S if failed else NVSHMEM_END_S, library.rank)
        end = AllRanks(job, name, library.ranks, library.rank)
        if failed or kept:
            end.decide(json.dumps([library.rank, "it has failed, or keeps gradients in NVSHMEM's memory"]))
            return
        end.gather("", "end NVSHMEM")
    except OdcError:
        return
    library.finalize()
    _job, _ends[store] = None, _ends.get(store, 0) + 1
