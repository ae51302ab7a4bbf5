"""Heaps of shared memory in one process and in a process each, and of a device for which memory files stand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from odc.errors import WaitTimeoutError
from odc.memory import Attachment, FreeMemory, HostLanes, ShmHeap, SymmetricHeap, cuda
from odc.memory.cuda import CudaHeap
from odc.memory.mapping import Mapping
from odc.net.requests import ask
from support.leaks import memfds_of
from support.listeners import served


def no_peer(_member: int) -> Attachment:
    raise AssertionError("there is no peer to connect to")


def lone(probe: Callable[[], FreeMemory] | None = None) -> ShmHeap:
    """A heap of one member, unsealed."""
    return ShmHeap("lone", (0,), 0, no_peer, 1.0, **({"probe": probe} if probe else {}))


def pair(identity: str = "pair", nbytes: int = 4096) -> tuple[ShmHeap, ShmHeap]:
    """Two members in this process."""
    heaps: list[ShmHeap] = []

    def connect(member: int) -> Attachment:
        peer = heaps[member]
        return Attachment(os.dup(peer.fd), peer.nbytes, peer.digest)

    heaps += [ShmHeap(identity, (3, 5), me, connect, 1.0) for me in range(2)]
    for heap in heaps:
        heap.allocate("flags", 64)
        heap.allocate("data", nbytes)
        heap.seal()
    return heaps[0], heaps[1]


def mapped(identity: str) -> int:
    """How often this process holds a heap's memory, as a mapping or as a descriptor."""
    return sum(f"odc.{identity}." in line for line in memfds_of(os.getpid()))


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
                fd, *others = answer.fds
                return Attachment(fd, answer.reply["nbytes"], answer.reply["digest"], tuple(others))
            time.sleep(0.01)
        raise WaitTimeoutError(f"rank {ranks[me]}: rank {ranks[member]} did not seal its heap in {deadline_s:g} s")

    heap = ShmHeap(identity, ranks, me, connect, deadline_s)

    def sealed() -> bool:
        return all(one.sealed for one in (heap, *outer))

    def answer(_request: object, _peer: object) -> tuple[dict[str, object], tuple[int, ...]]:
        return ({"nbytes": heap.nbytes, "digest": heap.digest}, (heap.fd, *heap.other_fds)) if sealed() else ({}, ())

    with served(address(identity, ranks[me]), answer):
        yield heap
    heap.close()


class MemoryFiles:
    """Stands for `odc.memory.driver_memory`."""

    def allocate(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, int]:
        fd = os.memfd_create(f"device{device.index}", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return Mapping(fd, nbytes).tensor(torch.uint8, 0, nbytes).fill_(7), fd  # a device's memory comes unfilled

    def map_shared(self, fd: int, nbytes: int, device: torch.device) -> torch.Tensor:
        return Mapping(fd, nbytes).tensor(torch.uint8, 0, nbytes)


@contextmanager
def without_a_device(identity: str, ranks: tuple[int, ...], me: int, deadline_s: float) -> Iterator[CudaHeap]:
    patch = pytest.MonkeyPatch()
    patch.setattr(cuda, "driver_memory", MemoryFiles())
    patch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 31))
    try:
        outer: list[SymmetricHeap] = []
        with shm_group(identity, ranks, me, deadline_s, outer) as host:
            heap = CudaHeap(host, torch.device("meta"), HostLanes())
            outer.append(heap)
            yield heap
            heap.close()
    finally:
        patch.undo()
