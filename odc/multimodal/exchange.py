"""Moves items between ranks by a rearrangement, and counts the bytes that cross nodes.

Stub for now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor

from odc.dispatch import Rearrangement
from odc.multimodal.minibatch import Phase
from odc.multimodal.results import PhaseCount
from odc.trace import COLLECTIVE, FETCH, recorder


@dataclass
class Exchange:
    """Moves rows between ranks.

    Args:
        per_node: ranks of a declared node.
    """

    per_node: int
    _counts: Mapping[Phase, PhaseCount] = field(default_factory=dict)

    def begin(self, counts: Mapping[Phase, PhaseCount]) -> None:
        """Starts a step; what is sent from now on is added to `counts`."""
        self._counts = counts

    def move(self, phase: Phase, mine: Tensor, sizes: ArrayLike, where: Rearrangement) -> Tensor:
        """Rows [R, ...] of this rank's items, end to end, to where their items go; returns the rows that arrived.

        Args:
            phase: on whose account.
            mine: rows of the items that this rank holds, in order.
            sizes: rows of every item, by flat source place.
            where: the move; nothing is done where it moves nothing.
        """
        if where == Rearrangement.identity(where.counts):
            return mine
        rank = dist.get_rank()
        size: list[int] = np.asarray(sizes).tolist()
        starts = where.starts
        own = range(int(starts[rank]), int(starts[rank + 1]))
        pieces = dict(zip(own, mine.split([size[i] for i in own]), strict=True))
        owners = where.owners
        order = sorted(own, key=lambda i: int(owners[i]))
        arriving = [int(i) for i in where.arriving(rank)]
        by_source = sorted(arriving)
        sent = [sum(size[i] for i in own if owners[i] == r) for r in range(where.instances)]
        got = [sum(size[i] for i in arriving if where.sources[i] == r) for r in range(where.instances)]
        packed = torch.cat([mine[:0], *(pieces[i] for i in order)])
        received = packed.new_empty(sum(got), *mine.shape[1:])
        with recorder().span(FETCH, unit=f"exchange {phase}", peer=COLLECTIVE):
            dist.all_to_all_single(received, packed, got, sent)
        arrived = dict(zip(by_source, received.split([size[i] for i in by_source]), strict=True))
        row = mine[:1].nbytes if len(mine) else received[:1].nbytes
        for r in range(where.instances):
            if r != rank:
                if r // self.per_node == rank // self.per_node:
                    self._counts[phase].near += sent[r] * row
                else:
                    self._counts[phase].far += sent[r] * row
        return torch.cat([received[:0], *(arrived[i] for i in arriving)])
