"""One clock for the ranks of all hosts: spans of each host are moved onto the clock of rank 0's host.

Every host counts nanoseconds from its own start. The first rank of a host asks rank 0 for the time a few times; the
answer of the quickest round trip belongs to its middle, so it is wrong by at most half of that trip.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from odc.experiments.update import by_rank
from odc.net.announced import host_identity
from odc.trace import Span

_TRIPS = 8
_TAG = 0x0DC


class CommonClock:
    """The hosts of all ranks, and how far this rank's clock is from that of rank 0. Every rank makes one; they meet.

    `hosts` numbers the host of each rank, in the order of the ranks. `now` reads this host's clock in nanoseconds.
    """

    def __init__(self, identity: str | None = None, now: Callable[[], int] = time.monotonic_ns) -> None:
        self._now = now
        self.offset_ns = self.error_ns = 0
        digest = hashlib.sha256((identity or host_identity()).encode()).digest()
        found = by_rank(torch.tensor(int.from_bytes(digest[:7]))).tolist()
        numbers = {host: number for number, host in enumerate(dict.fromkeys(found))}
        self.hosts = tuple(numbers[host] for host in found)
        self.host = self.hosts[dist.get_rank()]
        self._first = {host: self.hosts.index(host) for host in numbers.values()}  # rank

    def align(self) -> None:
        """Measure the offset; all ranks meet, where there are several hosts. Clocks drift, so call it now and then."""
        if len(self._first) == 1:
            return
        me, measured = dist.get_rank(), (0, 0)
        for host, first in self._first.items():
            if host and me == 0:
                self._answer(first)
            elif host and me == first:
                measured = min((self._trip() for _ in range(_TRIPS)), key=lambda trip: trip[1])
        self.offset_ns, self.error_ns = by_rank(torch.tensor(measured))[self._first[self.host]].tolist()

    def _answer(self, rank: int) -> None:
        asked = torch.empty(1, dtype=torch.int64)
        for _ in range(_TRIPS):
            dist.recv(asked, rank, tag=_TAG)
            dist.send(torch.tensor([self._now()]), rank, tag=_TAG)

    def _trip(self) -> tuple[int, int]:
        """(what to add to this clock's times, by how much that may be wrong)."""
        there, begin = torch.zeros(1, dtype=torch.int64), self._now()
        dist.send(there, 0, tag=_TAG)
        dist.recv(there, 0, tag=_TAG)
        end = self._now()
        return int(there) - (begin + end) // 2, (end - begin + 1) // 2

    def on_rank_0(self, spans: Iterable[Span]) -> list[Span]:
        """The same spans, timed by the clock of rank 0's host."""
        by = self.offset_ns
        return [span._replace(start_ns=span.start_ns + by, end_ns=span.end_ns + by) if by else span for span in spans]
