"""On which hosts the ranks of a root run, as they say themselves in the job's store, and this host's address there."""

from __future__ import annotations

import dataclasses
import socket
from collections import Counter
from typing import Any

from odc.errors import PeerLostError, UnsupportedError, WaitTimeoutError
from odc.runtime.grid import RankGrid
from odc.runtime.store import JobStore, failure, host_identity, host_of, store_address, underlying
from odc.runtime.wait import Backoff, Deadline

_POLL_S, _LONGEST_POLL_S = 0.002, 0.02


def locate(store: JobStore, grid: RankGrid) -> RankGrid:
    """`grid` with the hosts of its members; the same object where all are on this one.

    Waits until every rank has called `fully_shard`, or made an exchange. Raises as a JobStore does, WaitTimeoutError if
    a rank does not come up within the store's timeout, PeerLostError if one has ended with an error instead, and
    UnsupportedError where hosts have unequally many of the ranks.
    """
    here = host_identity()
    told = [here if rank == grid.rank else _await_host(store, rank, grid.rank) for rank in grid.ranks]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(told))}
    if len(numbers) == 1:
        return grid
    counts = Counter(told)
    if len(set(counts.values())) > 1:
        many = [
            f"ranks {', '.join(str(rank) for rank, one in zip(grid.ranks, told, strict=True) if one == host)}"
            for host in numbers
        ]
        raise UnsupportedError(
            f"rank {grid.rank}: the mesh of {len(grid.ranks)} ranks lies unequally on {len(numbers)} hosts "
            f"({'; '.join(many)}); every host must have equally many"
        )
    return dataclasses.replace(grid, hosts=tuple(numbers[host] for host in told))


def _await_host(store: JobStore, rank: int, me: int) -> str:
    deadline, backoff = Deadline(store.timeout_s), Backoff(_POLL_S, _LONGEST_POLL_S, growth=1.2)
    while (host := host_of(store, rank)) is None:
        doing = f"rank {me}, waiting for rank {rank} to come up"
        failed = failure(store)
        if failed is not None:
            culprit, reason = failed
            raise PeerLostError(f"{doing}: the job was aborted by rank {culprit}: {reason}", culprit=culprit)
        if deadline.passed():
            raise WaitTimeoutError(
                f"{doing}: it has not called fully_shard in {store.timeout_s:g} s, nor made an exchange; every rank of "
                "the mesh must shard the same modules",
                culprit=rank,
            )
        backoff.sleep()
    return host


def own_address(store: Any, address: str = "") -> str:
    """Where other hosts reach this one: at `address`, or at that of the interface by which the store is reached.

    `store` is torch's. Raises UnsupportedError where that cannot be told.
    """
    if address:
        return address
    hosted_at = store_address(store)
    if hosted_at is None:
        name = type(underlying(store)).__name__
        raise UnsupportedError(
            f"this host's address cannot be told from a {name}; set Settings(address=...) on each host"
        )
    host, port = hosted_at
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, there = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)  # of a datagram socket: chooses the interface, sends nothing
        return str(probe.getsockname()[0])
