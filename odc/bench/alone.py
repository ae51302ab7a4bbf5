"""All members of a job in one process: what a fetch and a push cost the processor, apart from other ranks.

Each member has a real layout, protocol and service; words lie in real memory files, data on `device`. No member
waits for another, so a call takes the host's time alone, but for a push on a device, which waits for that.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace

import torch
import torch.distributed as dist

from odc.bench.ranks import held
from odc.bench.rounds import Action
from odc.memory import Attachment, HostLanes, Lanes, ShmHeap
from odc.memory.cuda import CudaHeap, CudaLanes
from odc.protocol import Gradient, HeapLayout, RankGrid, UnitSpec
from odc.runtime import Endpoint, Service
from odc.settings import Settings

OWNERS, SLICES, SLICE = 8, 24, 64  # members, parameters of the unit, elements of each one's shard


class OneProcessHeap(CudaHeap):
    """A `CudaHeap` whose peers are in this process; `bases` has the memory of all, by member."""

    def __init__(self, host: ShmHeap, device: torch.device, lanes: Lanes, bases: list[torch.Tensor]) -> None:
        super().__init__(host, device, lanes, None, lambda: None)  # type: ignore[arg-type]
        self._all = bases

    def _create(self, nbytes: int) -> torch.Tensor:
        self._all.append(torch.zeros(nbytes, dtype=torch.uint8, device=self.device))
        return self._all[-1]

    def _map(self, local: torch.Tensor) -> dict[int, torch.Tensor]:
        return dict(enumerate(self._all))


class Members:
    """`owners` members of one job over one unit of `slices` parameters; close it.

    Attributes:
        endpoints, services: by member; all have published.
    """

    def __init__(
        self, device: torch.device, lanes: Lanes, settings: Settings, owners: int, slices: int, numel: int
    ) -> None:
        params = [(f"p{i}", numel, torch.bfloat16) for i in range(slices)]
        self.unit = UnitSpec.build(0, "unit", params, torch.float32)
        self.layouts: list[HeapLayout] = []
        bases: list[torch.Tensor] = []
        for me in range(owners):
            host = ShmHeap("alone", tuple(range(owners)), me, self._connect, settings.timeout_s)
            heap = OneProcessHeap(host, device, lanes, bases)
            grid = RankGrid(tuple(range(owners)), owners, me)
            self.layouts.append(HeapLayout(heap, grid, [self.unit], settings, "alone"))
        self.endpoints = [Endpoint(layout, lambda member: None) for layout in self.layouts]
        for endpoint in self.endpoints:
            endpoint.protocol.attach_all()
        self.services = [Service("alone", layout) for layout in self.layouts]
        shards = [[torch.zeros(numel, device=device) for _ in range(slices)]]
        for endpoint in self.endpoints:
            endpoint.shards.publish(shards, [True])

    def _connect(self, member: int) -> Attachment:
        heap = self.layouts[member].heap
        return Attachment(os.dup(heap.fd), os.fstat(heap.fd).st_size, heap.digest)

    def drain(self) -> None:
        """Have every member add what was pushed to it."""
        for service in self.services:
            while service.drain():
                pass

    def close(self) -> None:
        """Give all memory back."""
        for layout in self.layouts:
            layout.close()


def lanes_of(device: torch.device) -> Lanes:
    """The lanes that ranks have on `device`."""
    return CudaLanes(device) if device.type == "cuda" else HostLanes()


class UnitCalls:
    """Member 0's fetch and push of the unit, ready to be called again and again."""

    def __init__(self, members: Members, device: torch.device) -> None:
        self._members, self._end, unit = members, members.endpoints[0], members.unit
        owners = len(members.endpoints)
        self._into = [torch.empty(owners * p.numel, dtype=p.dtype, device=device) for p in unit.params]
        self._sent = [Gradient(i, torch.zeros_like(one)) for i, one in enumerate(self._into)]

    def fetch(self) -> None:
        """As the fetch thread does it."""
        with self._end.layout.heap.lanes.lane("fetch"):
            self._end.shards.fetch(self._members.unit, self._into)

    def push(self) -> None:
        """As the sender does it; `drain` comes before the next."""
        with self._end.layout.heap.lanes.lane("push"):
            self._end.pusher.push(self._members.unit, self._sent)

    def copies(self) -> None:
        """As many memmoves as a fetch on the CPU takes, of as many bytes, and nothing else."""
        for one in self._into:
            nbytes = one.nbytes // len(self._members.endpoints)
            for start in range(0, one.nbytes, nbytes):
                ctypes.memmove(one.data_ptr() + start, one.data_ptr() + start, nbytes)


def host(nbytes: int, device: str) -> list[Action]:
    """Fetch and push of a unit of 24 small slices over 8 owners, all in rank 0: bookkeeping, and hardly a byte."""
    fetch, push, copies = "fetch, host time a unit", "push, host time a unit", "its memmoves alone"
    idle = Action(copies, lambda: None)
    if dist.get_rank():
        asked = replace(idle, against=(copies,))
        return [replace(asked, name=fetch, queued=True), replace(asked, name=push), idle]
    here = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    members = Members(here, lanes_of(here), Settings(), OWNERS, SLICES, SLICE)
    held.closing = [members]
    calls = UnitCalls(members, here)
    return [
        Action(fetch, calls.fetch, 0, (copies,), queued=True),
        Action(push, calls.push, 0, (copies,), after=members.drain),  # a push waits for the device itself
        replace(idle, run=UnitCalls(members, torch.device("cpu")).copies),
    ]
