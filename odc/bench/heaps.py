"""Cases on a bare heap: get, put, and a signal there and back.

Chose heaps without a model around them, one region of data and one of words: what is timed is the memory and the copy,
as one rank would do it to one peer. All ranks do it at once, each with the next rank.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from odc.bench import rivals
from odc.bench.crew import held, meet
from odc.bench.rounds import Action
from odc.memory import Attachment, ShmHeap, SymmetricHeap

_TRIPS = 100
_DEADLINE_S = 60.0
_SMALL_ON_DEVICE = 256 << 20
_SMALL = 1 << 20  # bytes; below, an action is a loop, or the clock would be measured too


def open_heap(nbytes: int, device: str) -> SymmetricHeap:
    """A sealed heap of every rank, with regions "words" and "data" (`nbytes`); calls a collective. Kept in `held`."""
    ranks, me = tuple(range(dist.get_world_size())), dist.get_rank()
    places: list[tuple[int, int, int, str]] = []

    def connect(member: int) -> Attachment:
        pid, descriptor, size, digest = places[member]
        # A memory file has no name, but its owner's descriptor has one, for processes of the same user.
        return Attachment(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC), size, digest)

    host = ShmHeap("bench", ranks, me, connect, _DEADLINE_S)
    heap: SymmetricHeap = host if device == "cpu" else _on_device(host)
    heap.allocate("words", 64, words=True)
    heap.allocate("data", nbytes)
    heap.seal()
    places += _gathered((os.getpid(), host.fd, host.nbytes, host.digest))
    heap.base_addresses()
    held.closing = [heap]
    return heap


def _on_device(host: ShmHeap) -> SymmetricHeap:
    from odc.memory.cuda import CudaHeap
    from odc.memory.cuda_lanes import CudaLanes

    here = torch.device("cuda", torch.cuda.current_device())
    group = dist.group.WORLD
    assert group is not None  # the crew made it
    return CudaHeap(host, here, CudaLanes(here), group, meet)


def _gathered(mine: tuple[int, int, int, str]) -> list[tuple[int, int, int, str]]:
    every: list[tuple[int, int, int, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return [one for one in every if one is not None]


def _next() -> int:
    return (dist.get_rank() + 1) % dist.get_world_size()


def _times(nbytes: int, device: str) -> int:
    """On a device a copy of 16 MiB takes microseconds, as its launch does: many in a row show the copy."""
    return max(1, (_SMALL if device == "cpu" else _SMALL_ON_DEVICE) // nbytes)


def get(nbytes: int, device: str) -> list[Action]:
    """Copy `nbytes` of the next rank's heap into private memory; on a device by copy engine and by two kernels."""
    heap = open_heap(nbytes, device)
    peer = heap.tensor(_next(), "data", torch.float32)
    mine = torch.empty_like(peer)
    ways: dict[str, Callable[[], object]] = {"get": lambda: mine.copy_(peer)}
    if device == "cuda":
        ways["get, torch's kernel"] = lambda: torch._foreach_copy_([mine], [peer])
        if triton_is_here():
            from odc import kernels

            table, at = heap.base_addresses().to(heap.device), heap.layout.offset("data")
            ways["get, Triton kernel"] = lambda: kernels.get(mine, table, _next(), at)
    return _copies(ways, nbytes, device, rivals.all_gather(nbytes, device))


def put(nbytes: int, device: str) -> list[Action]:
    """Copy `nbytes` of private memory into the next rank's heap; on a device in the same three ways."""
    heap = open_heap(nbytes, device)
    peer = heap.tensor(_next(), "data", torch.float32)
    mine = torch.ones_like(peer)
    ways: dict[str, Callable[[], object]] = {"put": lambda: peer.copy_(mine)}
    if device == "cuda":
        ways["put, torch's kernel"] = lambda: torch._foreach_copy_([peer], [mine])
        if triton_is_here():
            from odc import kernels

            table, at = heap.base_addresses().to(heap.device), heap.layout.offset("data")
            ways["put, Triton kernel"] = lambda: kernels.put([mine], table, _next(), at)
    return _copies(ways, nbytes, device, rivals.all_to_all(nbytes, device))


def _copies(ways: dict[str, Callable[[], object]], nbytes: int, device: str, collectives: list[Action]) -> list[Action]:
    times = _times(nbytes, device)
    limit = rivals.copy(nbytes, device, times)
    against = (limit.name, *(other.name for other in collectives))
    made = [Action(name, rivals.repeated(run, times), nbytes, against, times) for name, run in ways.items()]
    return [*made, limit, *collectives]


def triton_is_here() -> bool:
    """Whether triton is installed."""
    return importlib.util.find_spec("triton") is not None


def signal(nbytes: int, device: str) -> list[Action]:
    """Rank 0 stores a word on rank 1, which answers with one on rank 0; the others look on."""
    heap, me = open_heap(64, device), dist.get_rank()
    pairs = {0: 1, 1: 0}
    sent = 0

    def trips() -> None:
        nonlocal sent
        if me not in pairs:
            return
        own, peer = heap.words(me, "words"), heap.words(pairs[me], "words")
        deadline = time.monotonic() + _DEADLINE_S
        for _ in range(_TRIPS):
            sent += 1
            if me == 0:
                peer.store(0, sent)
            while own.load(0) < sent:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {me}: no signal from rank {pairs[me]} in {_DEADLINE_S:g} s")
            if me == 1:
                peer.store(0, sent)

    other = rivals.barrier()
    return [Action("signal there and back", trips, 0, (other.name,), _TRIPS), other]
