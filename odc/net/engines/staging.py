"""Pinned host memory between a socket and a device, for hosts whose network does not reach device memory.

A read in progress has two chunks, each in another stream: while one is on its way between host and device, the other is
on the network. Nothing waits for the whole device.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Generator, Iterator

import torch

from odc.memory import Lanes

CHUNK_BYTES = 512 << 10
_KEPT = 16  # stages that no read uses now, of a device
_LANES = 8  # pairs of lanes; stages that share one wait for each other's copies, not for the network


def bytes_of(memory: torch.Tensor) -> memoryview:
    """The bytes of a uint8 CPU tensor, which stays alive with them."""
    refuse_odd(memory)
    return memoryview(memory.numpy())  # type: ignore[arg-type]  # an array has a buffer


def refuse_odd(memory: torch.Tensor) -> None:
    """Raise ValueError unless `memory` is uint8 [n] and contiguous."""
    if memory.dtype is not torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
        raise ValueError(f"an engine moves contiguous uint8 [n], not {memory.dtype} {list(memory.shape)}")


class Stage:
    """Two chunks of host memory and the lanes that fill and empty them; for one read at a time, on any thread."""

    def __init__(self, lanes: Lanes, number: int) -> None:
        self._lanes, self._pid = lanes, os.getpid()
        self._names = tuple(f"network {number % _LANES}.{half}" for half in range(2))
        with lanes.lane(self._names[0]):
            memory = torch.empty(2 * CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=lanes.asynchronous)
        self._chunks = memory.split(CHUNK_BYTES)
        self._views = [bytes_of(chunk) for chunk in self._chunks]

    def fill(self, into: torch.Tensor, receive: Callable[[memoryview], None]) -> None:
        """Call `receive` with every piece of host memory for it to fill, and copy what it brings to `into`.

        Returns when all has arrived on the device; whatever `receive` raises ends it.
        """
        try:
            for number, part in enumerate(into.split(CHUNK_BYTES)):
                half = number % 2
                with self._lanes.lane(self._names[half]):
                    self._lanes.settle()  # the chunk's last copy
                    receive(self._views[half][: part.numel()])
                    part.copy_(self._chunks[half][: part.numel()], non_blocking=True)
        finally:
            self.settle()

    def pieces(self, memory: torch.Tensor) -> Generator[memoryview]:
        """The bytes of `memory`, piece by piece; asking for the next one gives the last one back."""
        parts = memory.split(CHUNK_BYTES) if memory.numel() else ()
        try:
            self._fetch(0, parts[0]) if parts else None
            for number, part in enumerate(parts):
                if number + 1 < len(parts):
                    self._fetch(number + 1, parts[number + 1])
                with self._lanes.lane(self._names[number % 2]):
                    self._lanes.settle()
                yield self._views[number % 2][: part.numel()]
        finally:
            self.settle()

    def _fetch(self, number: int, part: torch.Tensor) -> None:
        with self._lanes.lane(self._names[number % 2]):
            self._chunks[number % 2][: part.numel()].copy_(part, non_blocking=True)

    def settle(self) -> None:
        """Return when no copy uses the chunks any more."""
        if os.getpid() != self._pid:  # a forked child: it has no device
            return
        for name in self._names:
            with self._lanes.lane(name):
                self._lanes.settle()


class Stages:
    """The stages of one engine, by device. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lanes: dict[torch.device, Lanes] = {}
        self._free: dict[torch.device, list[Stage]] = {}
        self._numbers = itertools.count()  # of all stages

    def needed(self, memory: torch.Tensor) -> bool:
        """Whether a socket cannot move these bytes."""
        return memory.device.type != "cpu"

    def prepare(self, device: torch.device) -> None:
        """Make the lanes of `device`, which is the current one of this thread; for reads on any thread."""
        with self._lock:
            if device not in self._lanes:
                self._lanes[device], self._free[device] = self._make_lanes(device), []

    def _make_lanes(self, device: torch.device) -> Lanes:
        from odc.memory.cuda_lanes import CudaLanes

        return CudaLanes(device)

    @contextlib.contextmanager
    def lend(self, device: torch.device) -> Iterator[Stage]:
        """A stage that no other thread uses, for the block."""
        self.prepare(device)
        stage = self._take(device)
        try:
            yield stage
        finally:
            # Without the lock, which a thread of the parent may hold when a forked child closes what it has inherited.
            if len(self._free[device]) < _KEPT:
                self._free[device].append(stage)

    def _take(self, device: torch.device) -> Stage:
        """One that is free, or a new one."""
        with self._lock:
            if self._free[device]:
                return self._free[device].pop()
            number = next(self._numbers)
        return Stage(self._lanes[device], number)

    def pieces(self, memory: torch.Tensor) -> Generator[memoryview]:
        """As `Stage.pieces`, from a stage that is lent until the last piece was taken."""
        with self.lend(memory.device) as stage:
            yield from stage.pieces(memory)
