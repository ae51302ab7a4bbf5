"""The simulated machine: ranks, how fast they compute, and what their links cost.

Every rank has one link to the ranks of its node and one to all other nodes, each at full speed in both directions.
On-demand transfers go straight from each owner to the reader, so a rank pulls all remote bytes through its own link;
with the node cache the ranks of a node share what one of them reads, once a minibatch, over all their links together,
and add up their gradients before those cross. Collectives are rings that bring each byte once into each node and spread
it over the node's links, or gloo's, one ring over all ranks. Not modelled: oversubscribed switches, a rank's pushes
slowing the fetches that it serves, and memory bandwidth that communication takes from compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from odc.errors import ConfigError

Algorithm = Literal["ring", "tree", "gloo"]


@dataclass(frozen=True)
class Cluster:
    """Ranks and links. By default communication costs nothing."""

    ranks: int
    ranks_per_node: int | None = None  # ranks that share a node; divides `ranks`. None: all of them.
    intra_bandwidth: float = math.inf  # bytes/s of one rank to and from the ranks of its node, each direction
    inter_bandwidth: float = math.inf  # bytes/s of one rank to and from other nodes, each direction
    intra_latency: float = 0.0  # seconds before the first byte, per transfer or hop
    inter_latency: float = 0.0
    # "ring" (ranks - 1 hops of latency), "tree" (log2 of that), or "gloo": one ring over all ranks that knows no nodes,
    # in which a reduction moves what an all-reduce does
    collective: Algorithm = "ring"
    node_cache: bool = False  # on demand over nodes, shards are read and gradients cross once a node (docs/hosts.md)
    changed: float = 1.0  # with the node cache, share of the parameters' bytes that is read (docs/changes.md)
    # gradient reductions a rank may have under way while it computes. 1: FSDP2 on a GPU, which waits for the last
    # unit's before it starts this one's; 0: each blocks, as in FSDP2 over gloo.
    reductions_in_flight: int = 1
    call_seconds: float = 0.0  # fixed time of every collective or transfer (launch, rendezvous, bookkeeping)
    # share of a unit that the fullest owner holds, over the mean share. 1: even shards; the number of ranks: one owner
    # holds everything, as a single parameter server does.
    owner_skew: float = 1.0
    slow: Mapping[int, float] = field(default_factory=dict)  # rank -> factor >= 0 on its compute time
    jitter: float = 0.0  # sigma of lognormal noise of mean 1 on each unit's compute time; 0 is none

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError(f"ranks must be 1 or more, not {self.ranks!r}")
        if self.node < 1 or self.ranks % self.node:
            raise ConfigError(f"ranks_per_node ({self.ranks_per_node!r}) must divide ranks ({self.ranks})")
        for name in ("intra_bandwidth", "inter_bandwidth"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0 bytes/s, not {getattr(self, name)!r}")
        for name in ("intra_latency", "inter_latency", "call_seconds", "jitter"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be finite, 0 or more, not {getattr(self, name)!r}")
        if self.collective not in get_args(Algorithm):
            raise ConfigError(f"collective must be one of {', '.join(get_args(Algorithm))}, not {self.collective!r}")
        if self.reductions_in_flight < 0:
            raise ConfigError(f"reductions_in_flight must be 0 or more, not {self.reductions_in_flight!r}")
        if not 1 <= self.owner_skew <= self.ranks:
            raise ConfigError(f"owner_skew must lie between 1 and the {self.ranks} ranks, not {self.owner_skew!r}")
        if not 0 <= self.changed <= 1 or (self.changed < 1 and not self.node_cache):
            raise ConfigError(
                f"changed must be a share, 0 to 1, and below 1 only with node_cache, not {self.changed!r}"
            )
        if self.node_cache and self.owner_skew > 1:
            raise ConfigError("owner_skew must be 1 with the node cache: its shards are even")
        for rank, factor in self.slow.items():
            if not (0 <= rank < self.ranks and 0 < factor < math.inf):
                raise ConfigError(
                    f"slow: ranks lie below {self.ranks} and factors above 0, unlike rank {rank!r} with {factor!r}"
                )

    @property
    def node(self) -> int:
        return self.ranks if self.ranks_per_node is None else self.ranks_per_node

    @property
    def nodes(self) -> int:
        return self.ranks // self.node

    def slowness(self) -> list[float]:
        """Factor on compute time by rank."""
        return [float(self.slow.get(rank, 1.0)) for rank in range(self.ranks)]

    def transfer_seconds(self, nbytes: float, shards: int) -> float:
        """One unit of `nbytes` fetched from (or pushed to) its `shards` owners, over both links at the same time."""
        near, far = self._near_and_far(nbytes, shards)
        if near + far == 0:
            return 0.0
        seconds = self.latency(shards) + max(near / self.intra_bandwidth, far / self.inter_bandwidth)
        return self.call_seconds + seconds

    def owner_seconds(self, nbytes: float, shards: int) -> tuple[float, float]:
        """Seconds that one rank's transfer occupies the fullest owner's links: into its node, and to other nodes."""
        fullest = nbytes * min(1.0, self.owner_skew / shards)
        near = fullest * (self.node - 1) / self.node / self.intra_bandwidth
        far = fullest * (self.ranks - self.node) / self.ranks / self.inter_bandwidth if shards > self.node else 0.0
        return near, far

    def latency(self, shards: int) -> float:
        """Seconds before the first byte of a transfer from `shards` owners."""
        return self.inter_latency if shards > self.node else self.intra_latency

    def cached(self, shards: int) -> bool:
        """Whether transfers from `shards` owners go through the node cache."""
        return self.node_cache and shards > self.node

    def read_seconds(self, nbytes: float) -> float:
        """A node reads its part of `nbytes` from all other nodes, over the links of its ranks together."""
        asked = self.call_seconds + 2 * self.inter_latency  # there and back
        return asked + nbytes * (self.nodes - 1) / self.nodes / (self.inter_bandwidth * self.node)

    def memory_seconds(self, nbytes: float, shards: int) -> float:
        """One unit of `nbytes` between a rank and the memory of its node, where all of it lies or is added."""
        others = nbytes * (shards - 1) / shards
        return self.call_seconds + (self.intra_latency + others / self.intra_bandwidth)

    def gather_seconds(self, nbytes: float, shards: int, *, reduces: bool = False) -> float:
        """All-gather of `nbytes` in all, or a reduce-scatter, over `shards` ranks, once all have arrived."""
        if shards == 1 or nbytes == 0:
            return 0.0
        rounds = 2 if reduces and self.collective == "gloo" else 1
        inside = self._padded(nbytes, shards) * (shards - 1) / shards / self.intra_bandwidth if self.node > 1 else 0.0
        nodes = max(1, shards // self.node)
        across = self.crossing(nbytes, shards) / min(self.node, shards) / self.inter_bandwidth
        return self.call_seconds + rounds * (self._hops(shards, nodes) + max(inside, across))

    def crossing(self, nbytes: float, shards: int) -> float:
        """Bytes of an all-gather of `nbytes` over `shards` ranks that leave a node; twice that of gloo's reductions."""
        nodes = max(1, shards // self.node)
        if nodes == 1:
            return 0.0
        parts = shards if self.collective == "gloo" else nodes
        return self._padded(nbytes, shards) * (parts - 1) / parts

    def _padded(self, nbytes: float, shards: int) -> float:
        """What a collective moves for `nbytes`: uneven shards are padded to the largest."""
        return nbytes * min(float(shards), self.owner_skew)

    def exchange_seconds(self, nbytes: float) -> float:
        """Reduce-scatter or all-gather between the nodes of `nbytes`, each rank with its peers of the same place."""
        if self.nodes == 1:
            return 0.0
        across = nbytes / self.node * (self.nodes - 1) / self.nodes / self.inter_bandwidth
        hops = math.ceil(math.log2(self.nodes)) if self.collective == "tree" else self.nodes - 1
        return self.call_seconds + hops * self.inter_latency + across

    def peer_seconds(self, nbytes: float) -> float:
        """`nbytes` that a rank gets from other ranks of its node."""
        return self.call_seconds + self.intra_latency + nbytes / self.intra_bandwidth

    def claim_seconds(self) -> float:
        """One atomic on another rank's memory: there and back."""
        return 2 * self.latency(self.ranks) if self.ranks > 1 else 0.0

    def _hops(self, shards: int, nodes: int) -> float:
        if self.collective == "gloo":
            return (shards - 1) * (self.inter_latency if nodes > 1 else self.intra_latency)
        if self.collective == "ring":
            return (shards - nodes) * self.intra_latency + (nodes - 1) * self.inter_latency
        inside = math.ceil(math.log2(min(self.node, shards))) * self.intra_latency
        return inside + math.ceil(math.log2(nodes)) * self.inter_latency

    def _near_and_far(self, nbytes: float, shards: int) -> tuple[float, float]:
        """Bytes over the link into the node, and over the link to other nodes."""
        share = nbytes / shards
        near = min(self.node, shards) - 1
        return share * near, share * (shards - 1 - near)
