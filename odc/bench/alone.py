"""All members of a job in one process: what a fetch and a push cost the processor, apart from other ranks.

Each member has a real layout, protocol and service; words lie in real memory files, data on `device`. No member
waits for another, so a call takes the host's time alone, but for a push on a device, which waits for that.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from odc.bench.ranks import held
from odc.bench.rounds import Action
from odc.hosts.links import Links
from odc.memory import Attachment, HostLanes, Lanes, ShmHeap
from odc.memory.cuda import CudaHeap
from odc.memory.cuda_lanes import CudaLanes
from odc.net.engines import Engine
from odc.protocol import Gradient, HeapLayout, RankGrid, UnitSpec
from odc.runtime import Endpoint, Service
from odc.settings import Settings

OWNERS, SLICES, SLICE = 8, 24, 64  # members, parameters of the unit, elements of each one's shard


Memory = Callable[[int], torch.Tensor]  #: from bytes to uint8 [bytes], zeros


class OneProcessHeap(CudaHeap):
    """A `CudaHeap` whose peers are in this process; `bases` has the memory of all, by member."""

    def __init__(
        self,
        host: ShmHeap,
        device: torch.device,
        lanes: Lanes,
        bases: list[torch.Tensor],
        memory: Memory,
        local: Sequence[int],
    ) -> None:
        super().__init__(host, device, lanes, local)
        self._all, self._memory = bases, memory

    def _create(self, nbytes: int) -> torch.Tensor:
        self._all.append(self._memory(nbytes))
        return self._all[-1]

    def _map(self, member: int) -> torch.Tensor:
        return self._all[member]


class Members:
    """`owners` members of one job over `units`, who have published nothing yet; close it.

    Args:
        lanes: of each member, by its number.
        memory: makes what lies on the device.
        notify: wakes a member's daemon; without it `drain` does its work.
        hosts: the host of each member, as of a `RankGrid`; () where all are on one.
        across: of a member's layout, what reads from other hosts, and the links there; where there are several.

    Attributes:
        unit: the first one.
        shards: of one member, in fp32, by unit and parameter.
        endpoints, services: by member.
    """

    def __init__(
        self,
        device: torch.device,
        lanes: Callable[[int], Lanes],
        settings: Settings,
        owners: int,
        units: Sequence[UnitSpec],
        memory: Memory | None = None,
        notify: Callable[[int], None] = lambda member: None,
        hosts: tuple[int, ...] = (),
        across: Callable[[HeapLayout], tuple[Engine, Links]] | None = None,
    ) -> None:
        make = memory or (lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8, device=device))
        self.unit, self.memory = units[0], make
        self.layouts: list[HeapLayout] = []
        bases: list[torch.Tensor] = []
        for me in range(owners):
            host = ShmHeap("alone", tuple(range(owners)), me, self._connect, settings.timeout_s)
            grid = RankGrid(tuple(range(owners)), owners, me, hosts)
            heap = OneProcessHeap(host, device, lanes(me), bases, make, grid.local)
            self.layouts.append(HeapLayout(heap, grid, units, settings, "alone"))
        self.endpoints = [Endpoint(layout, notify, *(across(layout) if across else ())) for layout in self.layouts]
        for endpoint in self.endpoints:
            endpoint.protocol.attach_all()
        self.services = [Service("alone", one.layout, one.drains()) for one in self.endpoints]
        self.shards = [[make(4 * param.numel).view(torch.float32) for param in unit.params] for unit in units]

    def publish(self) -> None:
        """Open every member's next epoch; nothing was pushed in the last one."""
        for endpoint in self.endpoints:
            endpoint.shards.publish(self.shards, [False] * len(endpoint.layout.units))

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


def sliced(slices: int, numel: int) -> UnitSpec:
    """A unit of `slices` parameters, `numel` elements of each a rank."""
    return UnitSpec.build(0, "unit", [(f"p{i}", numel, torch.bfloat16) for i in range(slices)], torch.float32)


def lanes_of(device: torch.device) -> Lanes:
    """The lanes that ranks have on `device`."""
    return CudaLanes(device) if device.type == "cuda" else HostLanes()


class UnitCalls:
    """Fetch and push of the first unit by member `me`, ready to be called again and again."""

    def __init__(self, members: Members, me: int = 0) -> None:
        self._members, self._end, self._unit = members, members.endpoints[me], members.unit
        self._into = self.place()
        self._sent = [Gradient(i, values) for i, values in enumerate(self.place())]

    def place(self) -> list[torch.Tensor]:
        """New memory for the unsharded parameters."""
        owners = len(self._members.endpoints)
        return [self._members.memory(owners * p.nbytes).view(p.dtype) for p in self._unit.params]

    def fetch(self, into: Sequence[torch.Tensor] | None = None) -> None:
        """As the fetch thread does it; to where it went before, unless `into` is given."""
        with self._end.layout.heap.lanes.lane("fetch"):
            self._end.shards.fetch(self._unit, into or self._into)

    def push(self) -> None:
        """As the sender does it; `drain` comes before the next."""
        with self._end.layout.heap.lanes.lane("push"):
            self._end.pusher.push(self._unit, self._sent)


def memmoves(unit: UnitSpec, owners: int) -> Callable[[], None]:
    """As many memmoves as a fetch on the CPU takes, of as many bytes, and nothing else."""
    into = [torch.zeros(owners * p.numel, dtype=p.dtype) for p in unit.params]

    def run() -> None:
        for one in into:
            nbytes = one.nbytes // owners
            for start in range(0, one.nbytes, nbytes):
                ctypes.memmove(one.data_ptr() + start, one.data_ptr() + start, nbytes)

    return run


def host(nbytes: int, device: str) -> list[Action]:
    """Fetch and push of a unit of 24 small slices over 8 owners, all in rank 0: bookkeeping, and hardly a byte."""
    fetch, push, copies = "fetch, host time a unit", "push, host time a unit", "its memmoves alone"
    idle = Action(copies, lambda: None)
    if dist.get_rank():
        asked = replace(idle, against=(copies,))
        return [replace(asked, name=fetch, queued=True), replace(asked, name=push), idle]
    here = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    lanes = lanes_of(here)
    members = Members(here, lambda _: lanes, Settings(), OWNERS, [sliced(SLICES, SLICE)])
    members.publish()
    held.closing = [members]
    calls = UnitCalls(members)
    return [
        Action(fetch, calls.fetch, 0, (copies,), queued=True),
        Action(push, calls.push, 0, (copies,), after=members.drain),  # a push waits for the device itself
        replace(idle, run=memmoves(members.unit, OWNERS)),
    ]
