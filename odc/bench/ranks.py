"""A pool of ranks in which the benchmark itself is rank 0, so that it times the call and not a message about it.

The other ranks are processes of `odc.ranks` that run module-level functions, pickled by name. Every rank computes on
one thread.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from odc.ranks.processes import RankProcesses as Processes
from odc.ranks.processes import RanksFailed, fork_server, task
from odc.ranks.worker import die_with, join, leave

#: What functions that run on a pool keep for the next one, in each process.
held = SimpleNamespace()


class RankPool:
    """`world` ranks in one process group; this process is rank 0. Use as a context manager, one at a time.

    On CUDA one in a process: see `alone`. A command may take `timeout_s`.
    """

    def __init__(self, world: int, timeout_s: float = 120.0, device: str = "cpu") -> None:
        self.world, self.device, self._timeout_s = world, device, timeout_s
        self._broken = False  # a rank failed: others may wait for it, and none can leave in good order
        self._others: Processes | None = None

    def __enter__(self) -> RankPool:
        from odc.fsdp.root_layout import forget_calls

        forget_calls()  # heaps are named by the order of construction; this process may have had a pool before
        server = fork_server()
        group = server.new_group(self.world, self.device, self._timeout_s)
        self._others = Processes(server, range(1, self.world), group=group, quiet=True)
        try:
            join(0, group)
        except BaseException:
            self._others.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        assert self._others is not None
        try:
            if raised[0] is None and not self._broken:
                self.each(_close_all)
                self._others.send(b"")
                leave()
                self._others.ended(self._timeout_s)
        finally:
            self._others.close()
            if dist.is_initialized():
                dist.destroy_process_group()
            vars(held).clear()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Has every other rank run `function(*args)`; `finish` collects."""
        assert self._others is not None
        self._others.send(task(function, *args))

    def finish(self) -> list[Any]:
        """What the other ranks' functions returned, by rank; raises `RanksFailed` with what went wrong there."""
        assert self._others is not None
        self._broken = True
        if not self._others.answers(self._timeout_s, grace_s=0.0):
            outcomes = self._others.outcomes
            for outcome in outcomes:
                if outcome.failed:
                    raise RanksFailed(f"rank {outcome.rank} failed:\n{outcome.describe()}")
            silent = ", ".join(str(one.rank) for one in outcomes if not one.answered)
            raise RanksFailed(f"rank {silent} did not answer in {self._timeout_s:g} s")
        self._broken = False
        return [outcome.value for outcome in self._others.outcomes]

    def others(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs `function(*args)` on every rank but this one; returns their answers by rank."""
        self.start(function, *args)
        return self.finish()

    def each(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs `function(*args)` on every rank at the same time; returns the answers by rank, this one's first."""
        self.start(function, *args)
        try:
            mine = function(*args)
        except BaseException:
            self._broken = True
            raise
        return [mine, *self.finish()]


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in a fresh process, which may open pools; both and the result are pickled.

    For pools on CUDA, of which a process may have only one: torch counts a process's exchanges of device handles, and
    all ranks must have taken part in as many.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), die_with, (os.getpid(),)) as pool:
        return pool.submit(function, *args).result()


def meet() -> None:
    """Returns once every rank of the pool has called it."""
    dist.all_reduce(torch.zeros(1))  # on the CPU: always gloo


def let_go() -> None:
    """Holds nothing any more. Heaps and exchanges of a case are closed: their descriptors outlive the objects."""
    for one in vars(held).pop("closing", ()):
        one.close()
    vars(held).clear()


def _close_all() -> None:
    """Shuts odc down while every peer still lives; the group is destroyed after that."""
    from odc.fsdp import shutdown

    meet()
    let_go()
    shutdown()
    meet()
