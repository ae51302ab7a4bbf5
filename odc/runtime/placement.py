"""On which hosts the ranks of a root run, as each rank reports in the job's store, and this host's address there."""

from __future__ import annotations

import dataclasses
from collections import Counter

from odc.errors import UnsupportedError
from odc.net.store import JobStore, await_host, host_identity, refuse_failure
from odc.protocol.grid import RankGrid


def locate(store: JobStore, grid: RankGrid) -> RankGrid:
    """`grid` with the hosts of its members; the same object where all are on this one.

    Waits until every rank has called `fully_shard`, or made an exchange. Raises as a JobStore does, WaitTimeoutError if
    a rank does not come up within the store's timeout, PeerLostError if one has ended with an error instead, and
    UnsupportedError where hosts have unequally many of the ranks.
    """
    here = host_identity()
    found = [here if rank == grid.rank else _await_host(store, rank, grid.rank) for rank in grid.ranks]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(found))}
    if len(numbers) == 1:
        return grid
    counts = Counter(found)
    if len(set(counts.values())) > 1:
        many = [
            f"ranks {', '.join(str(rank) for rank, one in zip(grid.ranks, found, strict=True) if one == host)}"
            for host in numbers
        ]
        raise UnsupportedError(
            f"rank {grid.rank}: the mesh of {len(grid.ranks)} ranks lies unequally on {len(numbers)} hosts "
            f"({'; '.join(many)}); every host must have equally many"
        )
    return dataclasses.replace(grid, hosts=tuple(numbers[host] for host in found))


def _await_host(store: JobStore, rank: int, me: int) -> str:
    doing = f"rank {me}, waiting for rank {rank} to come up"
    late = (
        f"{doing}: it has not called fully_shard in {store.timeout_s:g} s, nor made an exchange; every rank of the "
        "mesh must shard the same modules"
    )
    return await_host(store, rank, late, lambda: refuse_failure(store, doing))
