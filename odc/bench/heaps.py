"""Cases on a bare heap: get, put, add, and a signal there and back.

All ranks measure at once, each with the next rank. On a device each way to move data is measured alone, beside the way
that odc chooses by size.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from odc.bench import baselines
from odc.bench.ranks import held, meet
from odc.bench.rounds import Action, Prepare
from odc.memory import Attachment, ShmHeap, SymmetricHeap
from odc.movers.choice import mover_for
from odc.net.reactor import Reactor
from odc.net.requests import ask, serve_requests
from odc.settings import Settings

_log = logging.getLogger(__name__)
_opened = itertools.count()
_TRIPS = 100
_DEADLINE_S = 60.0
_SMALL = 1 << 20  # bytes; smaller copies are repeated, or the clock would be measured too
DEVICE_SPAN, _DEVICE_TIMES = 256 << 20, 256  # the same on a device: bytes, and launches that its queue takes

Pieces = Sequence[torch.Tensor]
Ways = dict[str, Callable[[int], object]]  # by name; each moves the i-th piece of memory
COPY_ENGINE, TORCH_KERNEL, TRITON_KERNEL = "cuMemcpyAsync", "torch's kernel", "Triton kernel"


def open_heap(nbytes: int, device: str) -> SymmetricHeap:
    """A heap of every rank with regions "words" and "data" (`nbytes`), closed by `let_go`. Calls a collective."""
    ranks, me = tuple(range(dist.get_world_size())), dist.get_rank()
    listeners: list[Any] = [None] * len(ranks)

    def connect(member: int) -> Attachment:
        answer = ask(listeners[member], {}, _DEADLINE_S)
        return Attachment(answer.fds[0], answer.reply["nbytes"], answer.reply["digest"], tuple(answer.fds[1:]))

    host = ShmHeap("bench", ranks, me, connect, _DEADLINE_S)
    heap: SymmetricHeap = host if device == "cpu" else _on_device(host)
    heap.allocate("words", 64, words=True)
    heap.allocate("data", nbytes)
    heap.seal()
    reactor = Reactor("odc-bench", lambda error: _log.error("the listener has failed", exc_info=error))
    reply, address = {"nbytes": host.nbytes, "digest": host.digest}, f"odc-bench.{os.getpid()}.{next(_opened)}"
    listener = serve_requests(reactor, address, lambda request, peer: (reply, (host.fd, *host.other_fds)))
    try:
        dist.all_gather_object(listeners, address)
        for member in range(len(ranks)):
            heap.whole(member)
        meet()  # all have mapped all
    finally:
        reactor.call(listener.close)
        reactor.stop(_DEADLINE_S)
    held.closing = [heap]
    return heap


def _on_device(host: ShmHeap) -> SymmetricHeap:
    from odc.memory.cuda import CudaHeap
    from odc.memory.cuda_lanes import CudaLanes

    here = torch.device("cuda", torch.cuda.current_device())
    return CudaHeap(host, here, CudaLanes(here))


def _next() -> int:
    return (dist.get_rank() + 1) % dist.get_world_size()


def _times(nbytes: int, device: str) -> int:
    """How often an action repeats a copy of `nbytes`: a device copies 16 MiB in as little time as a launch takes."""
    return max(1, (_SMALL if device == "cpu" else min(DEVICE_SPAN, _DEVICE_TIMES * nbytes)) // nbytes)


def get(nbytes: int, device: str) -> list[Action]:
    """Copies `nbytes` of the next rank's heap into private memory; on a device in each way that there is."""
    return _copies("get", nbytes, device, _device_gets, baselines.all_gather)


def put(nbytes: int, device: str) -> list[Action]:
    """Copies `nbytes` of private memory into the next rank's heap; on a device in each way that there is."""
    return _copies("put", nbytes, device, _device_puts, baselines.all_to_all)


def _copies(
    name: str, nbytes: int, device: str, device_ways: Callable[..., Ways], collectives: Prepare
) -> list[Action]:
    """Actions between private memory and the next rank's, both in pieces of `nbytes`."""
    times = _times(nbytes, device)
    apart = baselines.slices(times, device)
    heap = open_heap(nbytes * apart, device)
    mine = torch.ones(apart * nbytes // 4, device=device).split(nbytes // 4)
    peers = heap.tensor(_next(), "data", torch.float32).split(nbytes // 4)
    source, target = (peers, mine) if name == "get" else (mine, peers)
    ways: Ways = {name: lambda i: target[i].copy_(source[i])}
    if device == "cuda":
        ways = device_ways(heap, mine, peers)
    others = [baselines.copy(nbytes, device, times), *collectives(nbytes, device)]
    return [*_actions(ways, nbytes, times, apart, others), *others]


def _device_gets(heap: SymmetricHeap, mine: Pieces, peers: Pieces) -> Ways:
    """The way of a fetch, which depends on the size, and each way alone."""
    from odc.movers import driver

    size = mine[0].nbytes
    raw = [piece.view(torch.uint8) for piece in peers]
    usual = mover_for(Settings(), torch.device("cuda"), own=1)  # shard 0 is a peer's
    ways: Ways = {
        "get": lambda i: usual.gather([mine[i]], [0], 1, [(0, raw[i])]),
        f"get, {COPY_ENGINE}": lambda i: driver.copy(mine[i].data_ptr(), peers[i].data_ptr(), size),
        f"get, {TORCH_KERNEL}": lambda i: torch._foreach_copy_([mine[i]], [peers[i]]),
    }
    if triton_is_here():
        from odc.movers.compiled import CompiledMover

        kernel = CompiledMover(1, 1 << 62)  # shard 0 is a peer's, and no piece is large enough for the copy engine
        ways[f"get, {TRITON_KERNEL}"] = lambda i: kernel.gather([mine[i]], [0], 1, [(0, raw[i])])
    return ways


def _device_puts(heap: SymmetricHeap, mine: Pieces, peers: Pieces) -> Ways:
    """The way in which a push fills a staging slot, and kernels."""
    from odc.movers import driver

    peer, size, at = _next(), mine[0].nbytes, heap.layout.offset("data")
    ways: Ways = {
        "put": lambda i: driver.copy(peers[i].data_ptr(), mine[i].data_ptr(), size),
        f"put, {TORCH_KERNEL}": lambda i: torch._foreach_copy_([peers[i]], [mine[i]]),
    }
    if triton_is_here():
        from odc import kernels

        bases = [heap.whole(member).data_ptr() for member in range(len(heap.ranks))]
        table = torch.tensor(bases, dtype=torch.int64, device=heap.device)
        ways[f"put, {TRITON_KERNEL}"] = lambda i: kernels.put([mine[i]], table, peer, at + i * size)
    return ways


def _actions(ways: Ways, nbytes: int, times: int, apart: int, others: list[Action]) -> list[Action]:
    """One action for each way; a Triton kernel may fail to compile, and the others are measured all the same."""
    against = tuple(other.name for other in others)
    loops = {name: baselines.repeated(run, times, apart) for name, run in ways.items()}
    return [
        Action(name, loop, nbytes, against, times, queued=True, optional=name.endswith(TRITON_KERNEL))
        for name, loop in loops.items()
    ]


def add(nbytes: int, device: str) -> list[Action]:
    """On a device, adds `nbytes` of fp32, and half as many of bf16, to fp32 in the next rank's heap without locks.

    The limit of each is a copy that reads and writes as many bytes.
    """
    times, numel = _times(nbytes, device), nbytes // 4
    heap = open_heap(nbytes * times, device)
    peers = heap.tensor(_next(), "data", torch.float32).split(numel)
    full = torch.ones(times * numel, device=device).split(numel)
    half = torch.ones(times * numel, device=device, dtype=torch.bfloat16).split(numel)
    made: list[Action] = []
    for of, values in (("", full), (" of bf16", half)):
        moved = values[0].nbytes + 2 * nbytes  # reads the values and the sum, writes the sum
        limit = baselines.roofline(nbytes, moved, device, times, of)
        made += [*_actions(_device_adds(of, values, peers), nbytes, times, times, [limit]), limit]
    return made


def _device_adds(of: str, values: Pieces, peers: Pieces) -> Ways:
    ways: Ways = {f"add{of}, {TORCH_KERNEL}": lambda i: torch._foreach_add_([peers[i]], [values[i]])}
    if triton_is_here():
        from odc import kernels

        numel, table = peers[0].numel(), torch.tensor([peers[0].data_ptr()], device=peers[0].device)
        ways[f"add{of}, {TRITON_KERNEL}"] = lambda i: kernels.accumulate([values[i]], [numel], [i * numel], table)
    return ways


def triton_is_here() -> bool:
    """Whether triton is installed."""
    return importlib.util.find_spec("triton") is not None


def signal(nbytes: int, device: str) -> list[Action]:
    """Rank 0 stores a word on rank 1, which answers with one on rank 0; other ranks do nothing."""
    heap, me = open_heap(64, device), dist.get_rank()
    pairs = {0: 1, 1: 0}
    sent = 0

    def trips() -> None:
        nonlocal sent
        if me not in pairs:
            return
        mine, peer = heap.words(me, "words"), heap.words(pairs[me], "words")
        deadline = time.monotonic() + _DEADLINE_S
        for _ in range(_TRIPS):
            sent += 1
            if me == 0:
                peer.store(0, sent)
            while mine.load(0) < sent:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {me}: no signal from rank {pairs[me]} in {_DEADLINE_S:g} s")
            if me == 1:
                peer.store(0, sent)

    other = baselines.barrier()
    return [Action("signal there and back", trips, 0, (other.name,), _TRIPS), other]
