"""A crew of rank processes: the benchmark itself is rank 0, spawned children are the others and do what they are told.

Chose to measure in the benchmark's own process over measuring in a child: what pytest-benchmark times is then the call
itself, not a message about it. Children follow commands over a pipe (a module-level function and its arguments, pickled
by name), so both sides of a collective run the same function. Every rank computes on one thread.

A child ends when its pipe closes, and the kernel kills it should the benchmark die: nothing is left behind. On CUDA
ranks take the devices in turn; several share one where there are fewer, which NCCL refuses, so then only gloo is there.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
import torch.distributed as dist

_PR_SET_PDEATHSIG = 1

#: What functions that run on a crew leave for the next one, in each process.
held = SimpleNamespace()


class Crew:
    """`world` ranks in one gloo group; this process is rank 0. Use as a context manager, one at a time.

    On CUDA one in a process: see `alone`.

    Args:
        world: ranks, this process included.
        timeout_s: that one command may take.
        device: "cpu" or "cuda".
    """

    def __init__(self, world: int, timeout_s: float = 120.0, device: str = "cpu") -> None:
        self.world, self.device, self._timeout_s = world, device, timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="odc-bench-")
        self._broken = False  # a rank failed: the others may wait for it, nobody can leave in good order
        self._pipes: list[Connection] = []
        self._children: list[Any] = []

    def __enter__(self) -> Crew:
        context = multiprocessing.get_context("spawn")
        store = os.path.join(self._folder.name, "store")
        try:
            for rank in range(1, self.world):
                ours, theirs = context.Pipe()
                args = (theirs, os.getpid(), rank, self.world, store, self._timeout_s, self.device)
                child = context.Process(target=_follow, args=args)
                child.start()
                theirs.close()
                self._pipes.append(ours)
                self._children.append(child)
            _join(0, self.world, store, self._timeout_s, self.device)
        except BaseException:
            self._end(kill=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._broken:
                self.each(_leave)
        finally:
            self._end(kill=kind is not None or self._broken)

    def _end(self, *, kill: bool) -> None:
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            if kill:
                child.kill()
            child.join(10.0)
            if child.is_alive():
                child.kill()
                child.join()
        if dist.is_initialized():
            dist.destroy_process_group()
        vars(held).clear()
        self._folder.cleanup()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Have every other rank run `function(*args)`; `finish` collects."""
        for pipe in self._pipes:
            pipe.send((function, args))

    def finish(self) -> list[Any]:
        """What the other ranks' functions returned, by rank; raises what went wrong there."""
        self._broken, answers = True, []
        for rank, pipe in enumerate(self._pipes, 1):
            if not pipe.poll(self._timeout_s):
                raise TimeoutError(f"rank {rank} did not answer in {self._timeout_s:g} s")
            try:
                good, answer = pipe.recv()
            except EOFError as error:
                raise RuntimeError(f"rank {rank} died") from error
            if not good:
                raise RuntimeError(f"rank {rank} failed:\n{answer}")
            answers.append(answer)
        self._broken = False
        return answers

    def others(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function(*args)` on every rank but this one; returns their answers by rank."""
        self.start(function, *args)
        return self.finish()

    def each(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function(*args)` on every rank at the same time; returns the answers by rank, this one's first."""
        self.start(function, *args)
        try:
            mine = function(*args)
        except BaseException:
            self._broken = True
            raise
        return [mine, *self.finish()]


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in a fresh process, with crews of its own; both and the result are pickled.

    For crews on CUDA, of which a process may have only one: torch counts the exchanges of device handles that a process
    has taken part in and looks for its peers' under that number, so all ranks must have taken part in as many.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _end_with_parent, (os.getpid(),)) as pool:
        return pool.submit(function, *args).result()


def _end_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _join(rank: int, world: int, store: str, timeout_s: float, device: str) -> None:
    from odc.fsdp.root_layout import forget_calls

    forget_calls()  # heaps are named by the order of construction; this process may have had a crew before
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if world <= torch.cuda.device_count():
            backend = "cpu:gloo,cuda:nccl"
        else:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # torch's own switch, read when it maps
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
    )


def meet() -> None:
    """Return once every rank of the crew has called it."""
    dist.all_reduce(torch.zeros(1))  # on the CPU: always gloo


def let_go() -> None:
    """Hold nothing any more. Heaps and exchanges of a case are closed: their descriptors outlive the objects."""
    for one in vars(held).pop("closing", ()):
        one.close()
    vars(held).clear()


def _leave() -> None:
    """Leave odc while every peer still lives; the group is destroyed after that."""
    from odc.fsdp import shutdown

    meet()
    let_go()
    shutdown()
    meet()


def _follow(pipe: Connection, parent: int, rank: int, world: int, store: str, timeout_s: float, device: str) -> None:
    _end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark decides when it ends
    _join(rank, world, store, timeout_s, device)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            answer = True, function(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
        if not answer[0]:
            break
    dist.destroy_process_group()
