"""Two homes of the daemon's accumulation: the thread in the rank, as odc has it, or a process beside the rank.

The process is a benchmark's only: it asks the owner's daemon for the heap and the bell as a peer would, maps the heap
and runs the same `Service.drain` loop on the same bell, while the loop in the rank no longer listens to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from odc.bench.crew import held
from odc.memory import Attachment, ShmHeap
from odc.runtime import HeapLayout, RankGrid, Service, UnitSpec, daemon
from odc.runtime.listener import ask
from odc.settings import Settings

_FINGERPRINT = "odc-heap-1"  # of odc.fsdp.root: part of what two maps of one heap agree on


class OwnersHeap(ShmHeap):
    """A second map of a heap that another process of the same rank made."""

    def __init__(self, identity: str, grid: RankGrid, descriptor: int) -> None:
        super().__init__(identity, grid.ranks, grid.me, _nobody, 1.0)
        self._descriptor = descriptor

    def _create(self, nbytes: int) -> int:
        if os.fstat(self._descriptor).st_size != nbytes:
            raise ValueError("the owner's heap has another size")
        return os.dup(self._descriptor)


def _nobody(member: int) -> Attachment:
    raise LookupError(f"member {member}: the process beside the rank needs no peer")


def serve_beside(pipe: Connection, door: str, token: str, identity: str, parts: tuple[Any, ...]) -> None:
    """The process beside the rank: says when it is ready, with its private MiB, and serves until the pipe closes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    torch.set_num_threads(1)
    grid, units, settings = parts
    heap_fd, bell = ask(door, {"op": "attach", "root": identity, "token": token}, 10.0).fds
    layout = HeapLayout(OwnersHeap(identity, grid, heap_fd), grid, units, settings, _FINGERPRINT)
    service = Service(identity, layout)
    pipe.send(private_mib())
    pipe.recv()  # the loop in the rank has let go of the bell: who reads it first keeps the other asleep
    epoll = select.epoll()
    epoll.register(bell, select.EPOLLIN)
    epoll.register(pipe.fileno(), select.EPOLLIN)
    while True:
        for fd, _ in epoll.poll():
            if fd == pipe.fileno():
                return
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(bell)
            while service.drain():
                pass


def private_mib() -> float:
    """Resident memory of this process that it does not share, in MiB (its heap is shared)."""
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[f"Private_{kind}"].split()[0]) for kind in ("Clean", "Dirty")) / 1024


# on the owner ----------------------------------------------------------------------------------------------------


def start_thread(rank: int) -> dict[str, float]:
    """Start the daemon of this rank, before any root is built; seconds and private MiB it took."""
    daemon_before, begin = private_mib(), time.perf_counter()
    daemon(rank)
    return {"start_s": time.perf_counter() - begin, "private_MiB": private_mib() - daemon_before}


def move_out(rank: int) -> dict[str, float]:
    """Put accumulation into a process beside this rank; seconds until it serves, and its private MiB."""
    server = daemon(rank)
    (service,) = server._services.values()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    layout = service.layout
    parts: tuple[RankGrid, tuple[UnitSpec, ...], Settings] = (layout.grid, layout.units, layout.settings)
    begin = time.perf_counter()
    args = (theirs, server.address, service.token, service.identity, parts)
    held.beside = context.Process(target=serve_beside, args=args)
    held.beside.start()
    theirs.close()
    memory = ours.recv()
    took = time.perf_counter() - begin
    held.beside_pipe = ours
    _on_loop(lambda: server._selector.unregister(server.doorbell), rank)
    ours.send("go")
    return {"start_s": took, "private_MiB": memory}


def move_in(rank: int) -> None:
    """End the process beside this rank; its thread serves again."""
    server = daemon(rank)
    held.beside_pipe.close()
    held.beside.join(10)
    for service in server._services.values():
        for inbox in service._inboxes:  # go on where the process beside stopped
            inbox._taken = inbox._words.added()
    # The loop does not hear the bell now: register from here, it sleeps.
    server._selector.register(server.doorbell, select.EPOLLIN, server._on_doorbell)
    server.notify()


def _on_loop(task: Callable[[], Any], rank: int) -> None:
    """Run `task` on the daemon's thread and wait for it."""
    done = threading.Event()
    daemon(rank)._do(lambda: (task(), done.set()))
    if not done.wait(10):
        raise TimeoutError("the daemon's loop has not run a task in 10 s")
