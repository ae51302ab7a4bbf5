"""`RequestPlan`: how many requests of each kind every rank has, and what making them equal would cost.

Chose to exchange all kinds at once over a count per task as tasks are built: the kinds are then the same list, in the
same order, on every rank, also on ranks that have none of some. Collectives inside a model (FSDP2, DDP) need equal
counts; under odc the plan only says what padding would have wasted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from odc.errors import PlanError
from odc.eval.peers import Peers


@dataclass(frozen=True)
class RequestPlan:
    """Requests of each kind by member.

    Attributes:
        counts: by kind, in sorted order of kinds: requests of every member.
        me: own member.
    """

    counts: Mapping[str, tuple[int, ...]]
    me: int

    def __post_init__(self) -> None:
        for kind, counts in self.counts.items():
            if not counts or any(count < 0 for count in counts) or not 0 <= self.me < len(counts):
                raise PlanError(f"counts of {kind!r} do not fit member {self.me}: {counts}")

    def own(self, kind: str) -> int:
        """Requests of `kind` on this rank."""
        return self.counts[kind][self.me]

    def pads(self, kind: str) -> int:
        """Copies this rank needs of `kind`: the most any rank has, less its own."""
        return max(self.counts[kind]) - self.counts[kind][self.me]

    def waste(self, kind: str | None = None) -> int:
        """Requests that padding adds over all ranks, W * max - sum; of all kinds together without one."""
        kinds = self.counts if kind is None else [kind]
        return sum(len(self.counts[k]) * max(self.counts[k]) - sum(self.counts[k]) for k in kinds)


def plan_requests(counts: Mapping[str, int], peers: Peers) -> RequestPlan:
    """The plan of all ranks' requests. Every rank calls it, with its own counts by kind; it waits for all.

    Raises:
        PlanError: a negative count.
    """
    everyone = peers.exchange(dict(counts), "counts of requests")
    kinds = sorted({kind for one in everyone for kind in one})
    return RequestPlan({kind: tuple(one.get(kind, 0) for one in everyone) for kind in kinds}, peers.me)
