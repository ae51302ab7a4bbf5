"""Heaps of a group of ranks, a process each: of shared memory, or of a device for which memory files stand."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from odc.errors import WaitTimeoutError
from odc.memory import Attachment, HostLanes, ShmHeap, SymmetricHeap, cuda
from odc.memory import _torch_symmetric as symmetric
from odc.memory.cuda import CudaHeap
from odc.memory.mapping import Mapping
from odc.net.requests import ask
from support.listeners import served


def address(identity: str, rank: int) -> str:
    return f"odc-test.{identity}.{rank}"


@contextmanager
def shm_group(
    identity: str, ranks: tuple[int, ...], me: int, deadline_s: float, outer: Sequence[SymmetricHeap] = ()
) -> Iterator[ShmHeap]:
    """The member's unsealed heap; peers can attach to it from `seal` until the end of the block.

    They cannot before the `outer` heaps, of which it is a part, are sealed too.
    """

    def connect(member: int) -> Attachment:
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            try:
                answer = ask(address(identity, ranks[member]), {}, deadline_s)
            except ConnectionError:  # not open yet
                time.sleep(0.01)
                continue
            if answer.fds:
                return Attachment(answer.fds[0], answer.reply["nbytes"], answer.reply["digest"])
            time.sleep(0.01)
        raise WaitTimeoutError(f"rank {ranks[me]}: rank {ranks[member]} did not seal its heap in {deadline_s:g} s")

    heap = ShmHeap(identity, ranks, me, connect, deadline_s)

    def sealed() -> bool:
        return all(one.sealed for one in (heap, *outer))

    def answer(_request: object, _peer: object) -> tuple[dict[str, object], tuple[int, ...]]:
        return ({"nbytes": heap.nbytes, "digest": heap.digest}, (heap.fd,)) if sealed() else ({}, ())

    with served(address(identity, ranks[me]), answer):
        yield heap
    heap.close()


class MemoryFiles:
    """Stands for `odc.memory._torch_symmetric`, for one member of one heap."""

    SHARE = symmetric.SHARE
    may_share_devices = staticmethod(symmetric.may_share_devices)
    same_numbers: bool | None = None  # as given to `map_peers`

    def __init__(self, identity: str, me: int) -> None:
        self._key, self._me = f"memory-files/{identity}/", me
        self._store = dist.distributed_c10d._get_default_store()

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self._fd = os.memfd_create("device", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, nbytes)
        self._store.set(f"{self._key}{self._me}", f"{os.getpid()} {self._fd} {nbytes}")
        return Mapping(self._fd, nbytes).tensor(torch.uint8, 0, nbytes).fill_(7)  # a device's memory comes unfilled

    def map_peers(self, own: torch.Tensor, group: Any, me: int, *, same_numbers: bool) -> list[torch.Tensor]:
        self.same_numbers = same_numbers
        return [own if peer == me else self._map(peer) for peer in range(dist.get_world_size())]

    def _map(self, peer: int) -> torch.Tensor:
        pid, fd, nbytes = map(int, self._store.get(f"{self._key}{peer}").split())
        here = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return Mapping(here, nbytes).tensor(torch.uint8, 0, nbytes)
        finally:
            os.close(here)


@contextmanager
def without_a_device(identity: str, ranks: tuple[int, ...], me: int, deadline_s: float) -> Iterator[CudaHeap]:
    patch = pytest.MonkeyPatch()
    patch.setattr(cuda, "symmetric", MemoryFiles(identity, me))
    patch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 31))
    patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    patch.setattr(cuda.device_links, "adds_atomically", lambda device, uuids: True)
    patch.setattr(cuda, "_device_text", lambda device: f"0 GPU-{me}")  # as where a process sees one device alone
    try:
        outer: list[SymmetricHeap] = []
        with shm_group(identity, ranks, me, deadline_s, outer) as host:
            heap = CudaHeap(host, torch.device("meta"), HostLanes(), None, lambda: None)  # type: ignore[arg-type]
            outer.append(heap)
            yield heap
            heap.close()
    finally:
        patch.undo()
