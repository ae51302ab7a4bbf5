"""Who stands where: the ranks of one root's mesh, by shard and by replica.

Chose one flat member index (replica-major, the order of the mesh) for everything that addresses memory, so that plain
FSDP is hybrid sharding with one replica and needs no second code path. The price: names below say *member* where a
user would say rank; errors always translate to the global rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """Members of a root's mesh.

    Args:
        ranks: global rank of each member, replica-major: member = replica * shards + shard.
        shards: ranks that share one copy of the parameters (the shard dimension of the mesh).
        me: own member index.
    """

    ranks: tuple[int, ...]
    shards: int
    me: int

    def __post_init__(self) -> None:
        if self.shards < 1 or len(self.ranks) % self.shards or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"{len(self.ranks)} ranks {self.ranks} do not form rows of {self.shards} shards")
        if not 0 <= self.me < len(self.ranks):
            raise ValueError(f"member {self.me} is not one of {len(self.ranks)}")

    @property
    def members(self) -> range:
        """Every member index."""
        return range(len(self.ranks))

    @property
    def shard(self) -> int:
        """Own shard index, 0 to shards - 1."""
        return self.me % self.shards

    @property
    def row(self) -> tuple[int, ...]:
        """Members of the own replica, by shard index: the owners this rank fetches from and pushes to."""
        start = self.me - self.shard
        return tuple(range(start, start + self.shards))

    @property
    def column(self) -> tuple[int, ...]:
        """Members that own the same shard, in rank order (only itself without hybrid sharding)."""
        return tuple(range(self.shard, len(self.ranks), self.shards))

    def others(self) -> tuple[int, ...]:
        """Every member but the own one, starting with the next: ranks do not all visit the same peer first."""
        n = len(self.ranks)
        return tuple((self.me + step) % n for step in range(1, n))

    def row_from_next(self) -> tuple[int, ...]:
        """The own row starting with the next shard and ending with the own one."""
        row, at = self.row, self.shard
        return tuple(row[(at + step) % self.shards] for step in range(1, self.shards + 1))

    def distance(self, source: int, owner: int) -> int:
        """Steps from shard `source` forward to shard `owner` within a row; names the staging ring between them."""
        return (owner - source) % self.shards
