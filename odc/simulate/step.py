"""One step to simulate, and what it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from odc.arms import Transport, counts_with_dummies
from odc.errors import ConfigError
from odc.simulate.cluster import Cluster
from odc.simulate.workload import Gang, Model, Use, checked_seconds


@dataclass(frozen=True)
class Step:
    """One minibatch under one transport."""

    cluster: Cluster
    model: Model
    # `seconds[r][m]`, compute of microbatch m of rank r on a rank of factor 1 without jitter; a rank may have none.
    # Under "dynamic" only the list of all of them counts, not whose they are.
    seconds: Sequence[Sequence[float]]
    transport: Transport  # see `odc.arms.Arm`
    within_node: bool = False  # parameters and gradients sharded within each node
    prefetch: int = 1  # units fetched or gathered ahead of use, 0 or 1; never across the start of a pass
    seed: int = 0  # of the jitter
    gangs: Sequence[Gang] = ()  # split samples, which run before all microbatches and in this order; on demand alone
    reduce_once: bool = False  # collectives reduce in the last microbatch only, as FSDP2 without gradient sync before

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", checked_seconds(self.seconds, self.cluster.ranks))
        if self.prefetch not in (0, 1):
            raise ConfigError(f"prefetch must be 0 or 1, not {self.prefetch!r}")
        if self.transport not in ("collectives", "resident", "on demand", "dynamic"):
            raise ConfigError(f"there is no transport {self.transport!r}")
        if self.gangs and self.transport != "on demand":
            raise ConfigError(f"samples are split on demand alone, not under {self.transport!r}")
        for gang in self.gangs:
            if len(set(gang.ranks)) != len(gang.seconds) or not set(gang.ranks) <= set(range(self.cluster.ranks)):
                raise ConfigError(f"a split sample needs as many different ranks of the cluster as pieces: {gang}")

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the parameters."""
        return self.cluster.node if self.within_node else self.cluster.ranks

    @property
    def counts(self) -> list[int]:
        """Microbatches each rank runs, dummies included. Not known before the run under "dynamic"."""
        return counts_with_dummies(self.transport, [len(seconds) for seconds in self.seconds])

    def jobs(self) -> NDArray[np.float64]:
        """Compute seconds of all microbatches, rank after rank. Shape (microbatches,)."""
        return np.fromiter(chain.from_iterable(self.seconds), np.float64)

    def noise(self) -> NDArray[np.float64] | None:
        """Factor on the compute of each use of a unit, mean 1, or no noise. Shape (microbatches + pieces, uses)."""
        sigma = self.cluster.jitter
        if sigma == 0:
            return None
        jobs = sum(map(len, self.seconds)) + self.pieces
        shape = (jobs, 2 * len(self.model.units))
        normal = np.random.default_rng(self.seed).standard_normal(shape)
        return np.exp(sigma * normal - sigma * sigma / 2)

    @staticmethod
    def exchange_seconds(gang: Gang, use: Use) -> float | None:
        """Seconds of a gang's exchange in this use of a unit, which its ranks begin together; None where there is none.

        Backward exchanges keys and values once more, and their gradients.
        """
        return gang.exchange_seconds * (2 if use.backward else 1) if use.share else None

    @property
    def reduces_last(self) -> bool:
        """Whether gradients are reduced in the last microbatch only."""
        return self.transport == "resident" or (self.transport == "collectives" and self.reduce_once)

    @property
    def cached(self) -> bool:
        """Whether shards and sums cross nodes through the node cache."""
        return self.transport in ("on demand", "dynamic") and self.cluster.cached(self.shards)

    @property
    def pieces(self) -> int:
        """Of split samples, over all ranks."""
        return sum(len(gang.ranks) for gang in self.gangs)

    def ending_seconds(self) -> float:
        """From the last rank's arrival to the end of the step: gradients and parameters across nodes, optimizer."""
        model, cluster, across = self.model, self.cluster, 0.0
        if self.within_node:
            across = cluster.exchange_seconds(model.gradient_bytes) + cluster.exchange_seconds(model.parameter_bytes)
        elif self.cached:  # sums are complete, announced and read
            across = cluster.inter_latency + cluster.read_seconds(model.gradient_bytes * model.accumulator)
        return across + model.optimizer_seconds

    def node_bytes(self, counts: Sequence[int]) -> float:
        """Bytes that leave a node in the minibatch, the mean over nodes; `counts` are microbatches by rank.

        They are those of whole samples. A piece fetches and pushes what a microbatch does.
        """
        cluster, model, shards = self.cluster, self.model, self.shards
        apart = (cluster.nodes - 1) / cluster.nodes
        if self.within_node:
            return apart * (model.gradient_bytes + model.parameter_bytes)
        if self.cached:
            return apart * (model.parameter_bytes * cluster.changed + model.gradient_bytes * model.accumulator)
        uses = model.uses()
        fetched, pushed = sum(use.fetch_bytes for use in uses), sum(use.push_bytes for use in uses)
        if self.transport in ("on demand", "dynamic"):
            runs = sum(counts) + self.pieces
            return runs / cluster.nodes * (fetched + pushed) * (shards - cluster.node) / shards
        reduced = cluster.crossing(pushed, shards) * (2 if cluster.collective == "gloo" else 1)
        if self.transport == "resident":
            return cluster.crossing(model.parameter_bytes, shards) + reduced
        return max(counts) * cluster.crossing(fetched, shards) + reduced * (1 if self.reduce_once else max(counts))


@dataclass(frozen=True)
class StepResult:
    """One simulated minibatch."""

    seconds: float  # from the first rank's start to the end of the optimizer's update
    busy: tuple[float, ...]  # compute seconds by rank, the optimizer's included
    transfer: tuple[float, ...]  # seconds by rank in which it waited while its transfer or collective moved bytes
    microbatches: tuple[int, ...]  # by rank, dummies included
    node_bytes: float = 0.0  # that leave a node, the mean over nodes

    @property
    def bubble(self) -> float:
        """1 - mean over ranks of busy / step, 0 to 1: the definition of `odc.trace.breakdown`."""
        return 1.0 - fmean(self.busy) / self.seconds if self.seconds > 0 else 0.0

    @property
    def transfer_share(self) -> float:
        """Mean share of the step in which a rank waited for transfers."""
        return fmean(self.transfer) / self.seconds if self.seconds > 0 else 0.0

    @property
    def wait_share(self) -> float:
        """Mean share of the step spent waiting for other ranks: what is neither busy nor transfer."""
        return max(0.0, self.bubble - self.transfer_share)
