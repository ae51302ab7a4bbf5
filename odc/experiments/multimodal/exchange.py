"""The job's exchange between ranks, and what it moved within nodes and across them, with nodes as declared.

The exchange fits the arm's transport: one all-to-all where ranks meet at every layer anyway, else on demand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch.distributed as dist
from torch import Tensor

from odc.dispatch import Rearrangement
from odc.dispatch.exchange import AllGatherExchange, CollectiveExchange, Exchange, OnDemandExchange
from odc.dispatch.orchestrator import channels
from odc.dispatch.route import Route
from odc.experiments.multimodal.config import MultimodalConfig
from odc.experiments.multimodal.examples import MODALITIES, Example, Phase
from odc.experiments.multimodal.inputs import rows
from odc.experiments.multimodal.model import TowerGeometry
from odc.fsdp import default_store
from odc.trace import COLLECTIVE, FETCH, NO_PEER, recorder

_made = count()  # exchanges of this process, the same number on every rank


@dataclass
class PhaseCount:
    """One phase of one step on one rank: `items` that it computed and the sum of their `real` lengths, without dummies.

    `computed` counts the positions that went through the model, with padding and dummies. `near` and `far` are bytes of
    inputs, features and gradients that this rank sent to ranks of its own node, and of other nodes.
    """

    items: int = 0
    real: int = 0
    computed: int = 0
    near: int = 0
    far: int = 0


def make_exchange(config: MultimodalConfig, arena_bytes: int) -> Exchange:
    """The exchange of a job; all ranks call it together. `close` it while the process group is still there."""
    store, timeout_s, name = default_store(), config.job.timeout_s, f"train-mm{next(_made)}"
    if config.balance == "all-gather":
        return AllGatherExchange(store, timeout_s=timeout_s, name=name)
    if config.job.arm != "odc":
        return CollectiveExchange(store, timeout_s=timeout_s, name=name)
    ranks, named = range(dist.get_world_size()), channels(MODALITIES)
    return OnDemandExchange(
        store, ranks, dist.get_rank(), named, arena_bytes=arena_bytes, timeout_s=timeout_s, name=name
    )


def arena_bytes(examples: Sequence[Example], minibatch_size: int, geometry: TowerGeometry) -> int:
    """Bytes that no minibatch of these examples exceeds: the largest ones' inputs, texts, features and gradients."""
    row = {"image": 3 * geometry.patch**2, "audio": geometry.bins}
    sizes = [
        example.length * (2 * geometry.width * 4 + 8)
        + sum(rows(item) * row[modality] * 4 for modality in MODALITIES for item in example.media(modality))
        for example in examples
    ]
    repeated = (minibatch_size - 2) // len(sizes) + 2  # times that one example may be drawn, where epochs meet
    return max(1 << 20, sum(sorted(sizes * repeated)[-minibatch_size:]))


@dataclass
class Mover:
    """Moves one phase's rows at a time and counts them. On every rank, on its training thread."""

    exchange: Exchange
    per_node: int
    _step: int = 0
    _counts: Mapping[Phase, PhaseCount] = field(default_factory=dict)

    def begin(self, step: int, counts: Mapping[Phase, PhaseCount]) -> None:
        """Starts a step; what is sent from now on is added to `counts`."""
        self._step, self._counts = step, counts

    def move(self, phase: Phase, channel: str, where: Rearrangement, route: Route, mine: Tensor) -> Tensor:
        """Rows [R, ...] of this rank's items to where their items go; returns those that arrived. Waits for peers.

        `phase` is charged for them, `channel` names the move in this step, `route` is this rank's part of `where`, with
        the field `rows`. A `where` that leaves everything in place moves nothing, on any rank.
        """
        if where == Rearrangement.identity(where.counts):
            return mine
        sent = route.fields["rows"].sent.tolist()
        if isinstance(self.exchange, AllGatherExchange):
            sent = [sum(sent)] * len(sent)
        for to, number in enumerate(sent):
            self._count(phase, to, number * mine[0].nbytes if number else 0)
        peer = COLLECTIVE if isinstance(self.exchange, CollectiveExchange) else NO_PEER
        with recorder().span(FETCH, unit=f"exchange {channel}", peer=peer):
            return self.exchange.move(self._step, channel, route, {"rows": mine})["rows"]

    def _count(self, phase: Phase, to: int, nbytes: int) -> None:
        me, counts = self.exchange.me, self._counts[phase]
        if to // self.per_node != me // self.per_node:
            counts.far += nbytes
        elif to != me:
            counts.near += nbytes
