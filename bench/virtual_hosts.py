"""What lies between hosts in virtual time: NICs that are clocks, and links whose messages arrive later.

odc's own links, node cache and sums run over it as they are; see `bench.virtual_ranks`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.virtual_time import VirtualTime
from odc.hosts.links import Links
from odc.net.messages import Message, MessageReader


class VirtualReading:
    """A read that is over at a certain time."""

    def __init__(self, time: VirtualTime, over: float) -> None:
        self._time, self._over = time, over

    def finish(self) -> None:
        self._time.sleep(self._over - self._time.now())

    def drop(self) -> None:
        return


class VirtualNics:
    """One NIC a rank, which sends and receives at the same time at `rate` bytes/s. A message takes `wire` seconds."""

    def __init__(self, time: VirtualTime, ranks: int, rate: float, wire: float) -> None:
        self.time, self.rate, self.wire = time, rate, wire
        self.sends, self.receives = [0.0] * ranks, [0.0] * ranks  # when each is free
        self.received = [0] * ranks  # bytes

    def read(self, reader: int, owner: int, nbytes: int) -> float:
        """When a read that begins now will be over."""
        begin = max(self.time.now() + 2 * self.wire, self.sends[owner], self.receives[reader])
        self.sends[owner] = self.receives[reader] = over = begin + nbytes / self.rate
        self.received[reader] += nbytes
        return over


class VirtualEngine:
    """An `odc.net.engines.Engine` for RDMA, as far as `RemoteHeaps` asks. `spend` spends the host's time for a read."""

    only_into_own = True

    def __init__(self, nics: VirtualNics, me: int, spend: Callable[[], None]) -> None:
        self._nics, self._me, self._spend = nics, me, spend

    def begin(self, rank: int, region: str, offset: int, into: torch.Tensor, **asked: object) -> VirtualReading:
        self._spend()
        return VirtualReading(self._nics.time, self._nics.read(self._me, rank, into.numel()))


class VirtualLink:
    """An `odc.net.host_link.HostLink` to `member`; `wire` is given what is sent. Made in place of the real one."""

    def __init__(self, member: int, wire: Callable[[bytes], None], lost_after_s: float) -> None:
        self.member, self._wire = member, wire
        self.arrived = deque[bytes]()

    def send(self, encoded: bytes) -> None:
        self._wire(encoded)

    def messages(self, reader: MessageReader) -> Iterator[Message]:
        while self.arrived:
            yield from reader.feed(self.arrived.popleft())

    def room(self, nbytes: int) -> bool:
        return True

    def hang_up(self) -> None:
        return


class Wires:
    """All links of a job, by member: `connect` them once all ranks are there, then `run` the wires of each rank.

    `bells` are put a function that reads a link when something has arrived for a rank.
    """

    def __init__(self, time: VirtualTime, queue: Callable[[], Any], wire: float, bells: list[Any]) -> None:
        self._time, self._wire, self._bells = time, wire, bells
        self._sent = [queue() for _ in bells]
        self._readers: dict[tuple[int, int], tuple[VirtualLink, Callable[[], bool]]] = {}

    def connect(self, me: int, partner: int, links: Links, summed: Any) -> None:
        """Link `me` to `partner`; what `me` hears of sums goes to `summed`."""

        def wire(encoded: bytes) -> None:
            self._sent[me].put((self._time.now() + self._wire, partner, encoded))

        made: Any = links.add(partner, wire)  # type: ignore[arg-type]  # a VirtualLink, which takes it for its connection
        self._readers[me, partner] = made, links.reader(made, summed)

    def run(self, me: int) -> None:
        """Bring what `me` sends to the others, in order. On a thread of the simulation, for ever."""
        while True:
            at, partner, encoded = self._sent[me].get()
            if at > self._time.now():
                self._time.sleep(at - self._time.now())
            link, read = self._readers[partner, me]
            link.arrived.append(encoded)
            self._bells[partner].put(read)
