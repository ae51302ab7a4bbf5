"""On which hosts the ranks of a root run, as they say themselves in the job's store, and this host's address there."""

from __future__ import annotations

import dataclasses
from collections import Counter

from odc.deadlines import STORE_LONGEST_POLL_S, STORE_POLL_S, Backoff, Deadline
from odc.errors import PeerLostError, UnsupportedError, WaitTimeoutError
from odc.net.store import JobStore, failure, host_identity, host_of
from odc.protocol.grid import RankGrid


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
    deadline, backoff = Deadline(store.timeout_s), Backoff(STORE_POLL_S, STORE_LONGEST_POLL_S, growth=1.2)
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
