"""Cases on a bare heap: get, put, and a signal there and back.

Chose heaps without a model around them, one region of data and one of words: what is timed is the memory and the copy,
as one rank would do it to one peer. All ranks do it at once, each with the next rank.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from odc.bench import rivals
from odc.bench.crew import held
from odc.bench.rounds import Action
from odc.memory import Attachment, ShmHeap, SymmetricHeap

_TRIPS = 100
_DEADLINE_S = 60.0
_SMALL = 1 << 20  # bytes; below, an action is a loop, or the clock would be measured too


def open_heap(nbytes: int, device: str) -> SymmetricHeap:
    """A sealed heap of every rank, with regions "words" and "data" (`nbytes`); calls a collective. Kept in `held`."""
    ranks, me = tuple(range(dist.get_world_size())), dist.get_rank()
    places: list[tuple[int, int, int, str]] = []

    def connect(member: int) -> Attachment:
        pid, descriptor, size, digest = places[member]
        # A memory file has no name, but its owner's descriptor has one, for processes of the same user.
        return Attachment(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC), size, digest)

    heap = ShmHeap("bench", ranks, me, connect, _DEADLINE_S)
    heap.allocate("words", 64)
    heap.allocate("data", nbytes)
    heap.seal()
    places += _gathered((os.getpid(), heap.fd, heap.nbytes, heap.digest))
    held.heap = heap
    return heap


def _gathered(mine: tuple[int, int, int, str]) -> list[tuple[int, int, int, str]]:
    every: list[tuple[int, int, int, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return [one for one in every if one is not None]


def _next() -> int:
    return (dist.get_rank() + 1) % dist.get_world_size()


def _times(nbytes: int) -> int:
    return max(1, _SMALL // nbytes)


def get(nbytes: int, device: str) -> list[Action]:
    """Copy `nbytes` of the next rank's heap into private memory."""
    peer = open_heap(nbytes, device).tensor(_next(), "data", torch.float32)
    mine, times = torch.empty_like(peer), _times(nbytes)
    limit, others = rivals.copy(nbytes, device, times), rivals.all_gather(nbytes, device)
    run = rivals.repeated(lambda: mine.copy_(peer), times)
    return [Action("get", run, nbytes, (limit.name, *(o.name for o in others)), times), limit, *others]


def put(nbytes: int, device: str) -> list[Action]:
    """Copy `nbytes` of private memory into the next rank's heap."""
    peer = open_heap(nbytes, device).tensor(_next(), "data", torch.float32)
    mine, times = torch.ones_like(peer), _times(nbytes)
    limit, others = rivals.copy(nbytes, device, times), rivals.all_to_all(nbytes, device)
    run = rivals.repeated(lambda: peer.copy_(mine), times)
    return [Action("put", run, nbytes, (limit.name, *(o.name for o in others)), times), limit, *others]


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
