"""Who takes part in one root: the ranks of its mesh by replica and by shard, and the hosts that they run on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from odc.errors import UnsupportedError


@dataclass(frozen=True)
class RankGrid:
    """The ranks of one root's mesh, by replica and by shard: global ranks of the members, and `shards` to a replica.

    Memory is addressed by *member*: replica * shards + shard, with the shards as torch numbers them, which is not
    always the order of the mesh; `me` is this rank's. Messages name global ranks, never members.

    `hosts` numbers the host of each member, from 0 in the order of the members; () where all share this rank's. Every
    host has equally many, and a member's `index` is its place among those of its host.

    A *node* is where shards of members elsewhere are cached and gradients for them summed: a host, or the runs of
    `node_size` members into which a host is divided.
    """

    ranks: tuple[int, ...]
    shards: int
    me: int
    hosts: tuple[int, ...] = ()
    node_size: int = 0

    def __post_init__(self) -> None:
        if self.shards < 1 or len(self.ranks) % self.shards or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"{len(self.ranks)} ranks {self.ranks} do not form groups of {self.shards} shards")
        if not 0 <= self.me < len(self.ranks):
            raise ValueError(f"member {self.me} is not one of {len(self.ranks)}")
        if self.node_size and (self.shards % self.node_size or not self.node_size < self.shards == len(self.ranks)):
            raise ValueError(f"nodes of {self.node_size} members do not divide one replica of {len(self.ranks)}")
        if self.hosts:
            counts = Counter(self.hosts)
            if len(self.hosts) != len(self.ranks) or list(counts) != list(range(len(counts))):
                raise ValueError(f"hosts {self.hosts} of {len(self.ranks)} members are not numbered as they occur")
            if len(set(counts.values())) != 1:
                raise ValueError(f"hosts {self.hosts} do not have equally many members")

    @property
    def rank(self) -> int:
        """This rank's global rank."""
        return self.ranks[self.me]

    @property
    def members(self) -> range:
        return range(len(self.ranks))

    @property
    def shard(self) -> int:
        """This rank's shard index, 0 to shards - 1."""
        return self.me % self.shards

    @property
    def shard_group(self) -> tuple[int, ...]:
        """Members of this rank's replica by shard index: the owners it fetches from and pushes to."""
        start = self.me - self.shard
        return tuple(range(start, start + self.shards))

    @property
    def replica_group(self) -> tuple[int, ...]:
        """Members that own the same shard as this rank, by replica; this rank alone without hybrid sharding."""
        return tuple(range(self.shard, len(self.ranks), self.shards))

    def others(self) -> tuple[int, ...]:
        """Every other member, starting with the next one, so that ranks do not all begin with the same peer."""
        n = len(self.ranks)
        return tuple((self.me + step) % n for step in range(1, n))

    def shard_group_from_next(self) -> tuple[int, ...]:
        """The shard group, starting with the next shard and ending with this rank's own."""
        group, at = self.shard_group, self.shard
        return tuple(group[(at + step) % self.shards] for step in range(1, self.shards + 1))

    # hosts -------------------------------------------------------------------------------------------------------

    @cached_property
    def host_count(self) -> int:
        return len(set(self.hosts)) if self.hosts else 1

    @cached_property
    def _by_host(self) -> tuple[tuple[int, ...], ...]:
        """Members on each host. Every push asks for its owners' hosts, so members are counted once for all."""
        found: list[list[int]] = [[] for _ in range(self.host_count)]
        for member in self.members:
            found[self.host(member)].append(member)
        return tuple(tuple(members) for members in found)

    @cached_property
    def _indices(self) -> dict[int, int]:
        return {member: index for members in self._by_host for index, member in enumerate(members)}

    def host(self, member: int) -> int:
        return self.hosts[member] if self.hosts else 0

    def is_remote(self, member: int) -> bool:
        return bool(self.hosts) and self.hosts[member] != self.hosts[self.me]

    def steps_to(self, member: int) -> int:
        """From this rank's host forward to the member's, 0 to hosts - 1; a rank that takes hosts in this order meets no
        other host there.
        """
        return (self.host(member) - self.here) % self.host_count

    @property
    def here(self) -> int:
        """This rank's host."""
        return self.host(self.me)

    @cached_property
    def local(self) -> tuple[int, ...]:
        """Members on this rank's host, itself included, by index."""
        return self.on(self.here)

    @cached_property
    def remote(self) -> tuple[int, ...]:
        """Members on other hosts."""
        return tuple(member for member in self.members if self.is_remote(member))

    def on(self, host: int) -> tuple[int, ...]:
        """Members on `host`, by index."""
        return self._by_host[host]

    def index(self, member: int) -> int:
        """The member's place among those of its host."""
        return self._indices[member]

    def column(self, member: int) -> int:
        """The member on this rank's host with the same index: what this host knows of `member` lies in its heap."""
        return self.local[self.index(member)]

    def partner(self, host: int) -> int:
        """The member on `host` with this rank's index."""
        return self.on(host)[self.index(self.me)]

    @cached_property
    def partners(self) -> tuple[int, ...]:
        """The member on each other host with this rank's index, by host."""
        return tuple(self.partner(host) for host in range(self.host_count) if host != self.here)

    def row(self, host: int, seen_from: int | None = None) -> int:
        """The place of `host` among the other hosts, as seen from this one or from another."""
        mine = self.here if seen_from is None else seen_from
        if host == mine:
            raise ValueError(f"host {host} keeps no mirror of itself")
        return host if host < mine else host - 1

    @cached_property
    def local_shard_group(self) -> tuple[int, ...]:
        """Members of the shard group on this rank's host, by shard index."""
        return tuple(member for member in self.shard_group if self.host(member) == self.here)

    @property
    def shards_span_hosts(self) -> bool:
        """Whether some shards of this rank's replica are on other hosts."""
        return len(self.local_shard_group) < self.shards

    @cached_property
    def nodes(self) -> RankGrid:
        """The same members, each on its node as if that were a host; this grid where nodes are hosts."""
        numbers = tuple(member // self.node_size for member in self.members) if self.node_size else self.hosts
        return self if numbers == self.hosts else dataclasses.replace(self, hosts=numbers, node_size=0)

    def distance(self, source: int, owner: int) -> int:
        """Steps from member `source` forward to member `owner` in the shard group of their node; names the staging
        ring between them.
        """
        group = self.nodes.local_shard_group
        return (group.index(owner) - group.index(source)) % len(group)


def refuse_unsupported(grid: RankGrid, *, kernels: str) -> None:
    """Raise `UnsupportedError` for what does not work over several hosts."""
    if grid.host_count == 1:
        return
    where = f"rank {grid.rank}: the ranks of this mesh are on {grid.host_count} hosts, and"
    if any(len({grid.host(member) for member in grid.nodes.on(node)}) > 1 for node in range(grid.nodes.host_count)):
        raise UnsupportedError(
            f"{where} the shard dimension spans several of them; with optimizer_sharding='world' it lies within a host"
        )
    if grid.shards_span_hosts and len(grid.replica_group) > 1:
        raise UnsupportedError(
            f"{where} a replica's shards lie on several of them; over hosts shard over all ranks (a 1-D mesh), or keep "
            "each replica on one host"
        )
    if kernels == "triton":
        raise UnsupportedError(f"{where} Settings(kernels={kernels!r}) works within one host only")
