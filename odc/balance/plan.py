"""A plan: which rank computes which samples in which microbatch, and what a cost model predicts that to cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from odc.balance.bound import lower_bound
from odc.balance.slices import SplitSample
from odc.errors import PlanError

_SHOWN = 8  # split samples that a table lists


@dataclass(frozen=True)
class Plan:
    """The samples of one minibatch, spread over ranks and microbatches. Immutable."""

    # `ranks[r][m]` lists the sample indices of microbatch m of rank r. A rank may have no microbatch. An empty
    # microbatch is a placeholder in plans with equal counts: the rank joins the barrier with a dummy.
    ranks: list[list[list[int]]]
    # `costs[r][m]` is the predicted cost of that microbatch, divided by the rank's speed where there are speeds
    costs: list[list[float]]
    bound: float  # no plan over these ranks has a longest rank below this cost
    speeds: list[float] | None = None  # of each rank, or None when all are alike
    # samples that run as pieces on several ranks, before all microbatches and in this order
    splits: list[SplitSample] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        ranks: list[list[list[int]]],
        sample_costs: Sequence[float],
        *,
        speeds: Sequence[float] | None = None,
        bound: float | None = None,
        splits: Sequence[SplitSample] = (),
    ) -> Plan:
        """The plan of `ranks` where sample i costs `sample_costs[i]` on a rank of speed 1, validated; raises PlanError.

        `bound` defaults to the lower bound for samples that any rank may hold.
        """
        if not ranks:
            raise PlanError("a plan needs at least one rank")
        known = None if speeds is None else [float(speed) for speed in speeds]
        if bound is None:
            bound = lower_bound(sample_costs, len(ranks), speeds=known)
        plan = cls(ranks, [[0.0] * len(microbatches) for microbatches in ranks], bound, known, list(splits))
        plan.validate(len(sample_costs))
        for rank, costs in enumerate(plan.costs):
            speed = 1.0 if known is None else known[rank]
            costs[:] = [float(sum(sample_costs[i] for i in mb)) / speed for mb in ranks[rank]]
        return plan

    @property
    def samples(self) -> int:
        """Number of samples in the plan."""
        return len(self.splits) + sum(len(mb) for microbatches in self.ranks for mb in microbatches)

    @property
    def rank_costs(self) -> list[float]:
        """Predicted cost of each rank, its pieces of split samples included."""
        totals = [sum(costs) for costs in self.costs]
        for split in self.splits:
            for rank, cost in zip(split.ranks, split.costs, strict=True):
                totals[rank] += cost
        return totals

    @property
    def rank_ends(self) -> list[float]:
        """When each rank ends: its cost, and its waits for the others that hold pieces of the same samples."""
        return [end + sum(costs) for end, costs in zip(self.split_ends, self.costs, strict=True)]

    @property
    def longest(self) -> float:
        """When the last rank ends: the predicted step time with one barrier per minibatch."""
        return max(self.rank_ends)

    @property
    def stepped(self) -> float:
        """Predicted step time with a barrier per microbatch, counts padded to the maximum: sum of the maxima."""
        return self._stepped_within(len(self.costs))

    def _stepped_within(self, node: int) -> float:
        nodes = [self.costs[first : first + node] for first in range(0, len(self.costs), node)]
        return max(self.split_ends) + max(sum(map(max, zip_longest(*costs, fillvalue=0.0))) for costs in nodes)

    @property
    def bubble(self) -> float:
        """Predicted share of device time spent waiting with one barrier per minibatch: 1 - mean/max over ranks."""
        return self._idle_share(self.longest)

    @property
    def bubble_per_microbatch(self) -> float:
        """Predicted share of device time spent waiting with one barrier per microbatch."""
        return self._idle_share(self.stepped)

    def bubble_within(self, node: int) -> float:
        """As `bubble_per_microbatch`, where each `node` ranks in a row meet by themselves, and all ranks at the end."""
        return self._idle_share(self._stepped_within(node))

    @property
    def bubble_bound(self) -> float:
        """The bubble if the longest rank ended at the bound; with equal speeds every plan has at least this."""
        return self._idle_share(self.bound)

    @property
    def gap(self) -> float:
        """How far the longest rank lies above the lower bound: max/bound - 1."""
        return self.longest / self.bound - 1.0 if self.bound > 0 else 0.0

    def validate(self, samples: int) -> None:
        """Raise PlanError unless each index of `range(samples)` is listed once and `costs` has the shape of `ranks`."""
        if [len(costs) for costs in self.costs] != [len(microbatches) for microbatches in self.ranks]:
            raise PlanError("costs and ranks of the plan differ in shape")
        if self.speeds is not None and len(self.speeds) != len(self.ranks):
            raise PlanError(f"the plan has {len(self.speeds)} speeds for {len(self.ranks)} ranks")
        seen = [0] * samples
        for split in self.splits:
            split.validate(len(self.ranks))
            if not 0 <= split.sample < samples or seen[split.sample]:
                raise PlanError(f"split sample {split.sample} is listed twice, or is none of {samples} samples")
            seen[split.sample] = 1
        for rank, microbatches in enumerate(self.ranks):
            for m, indices in enumerate(microbatches):
                for i in indices:
                    if not 0 <= i < samples:
                        raise PlanError(
                            f"rank {rank}, microbatch {m} lists sample {i}, but there are {samples} samples"
                        )
                    if seen[i]:
                        raise PlanError(f"sample {i} is listed twice, again in microbatch {m} of rank {rank}")
                    seen[i] = 1
        if sum(seen) != samples:
            raise PlanError(
                f"sample {seen.index(0)} is in no microbatch ({samples - sum(seen)} of {samples} are missing)"
            )

    def to_json(self) -> str:
        """One line of JSON, `speeds` and `splits` where given; `from_json` gives back an equal plan, to the bit."""
        fields: dict[str, Any] = {"ranks": self.ranks, "costs": self.costs, "bound": self.bound}
        if self.speeds is not None:
            fields["speeds"] = self.speeds
        if self.splits:
            fields["splits"] = [split.to_dict() for split in self.splits]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan saved by `to_json`, validated; raises PlanError for anything else."""
        try:
            data: Any = json.loads(text)
            plan = cls(
                ranks=[[[int(i) for i in mb] for mb in microbatches] for microbatches in data["ranks"]],
                costs=[[float(c) for c in costs] for costs in data["costs"]],
                bound=float(data["bound"]),
                speeds=[float(speed) for speed in data["speeds"]] if data.get("speeds") is not None else None,
                splits=[SplitSample.from_dict(split) for split in data.get("splits", [])],
            )
        except (ValueError, ArithmeticError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"this is not a plan: {type(error).__name__}: {error}") from error
        if not plan.ranks:
            raise PlanError("a plan needs at least one rank")
        plan.validate(plan.samples)
        return plan

    def __str__(self) -> str:
        return self.table()

    def table(self, most: int = 64) -> str:
        """A line a rank, of the `most` longest ranks where there are more, and the figures of the plan."""
        times = self.rank_ends
        shown = sorted(sorted(range(len(times)), key=lambda rank: -times[rank])[:most])
        rows = [f"{'rank':>5} {'samples':>8} {'microbatches':>13} {'cost':>12} {'of longest':>11}"]
        if self.speeds is not None:
            rows[0] += f" {'speed':>7}"
        for rank in shown:
            count = sum(len(mb) for mb in self.ranks[rank]) + sum(rank in split.ranks for split in self.splits)
            share = times[rank] / self.longest if self.longest > 0 else 1.0
            row = f"{rank:>5} {count:>8} {len(self.ranks[rank]):>13} {times[rank]:>12.5g} {share:>11.1%}"
            rows.append(row if self.speeds is None else f"{row} {self.speeds[rank]:>7.4g}")
        if len(shown) < len(times):
            rows.append(f"  and {len(times) - len(shown)} ranks that end sooner")
        mean = sum(self.rank_costs) / len(times)
        if self.splits:
            pieces = sum(len(split.ranks) for split in self.splits)
            rows.append(f"{len(self.splits)} samples run first, split into {pieces} pieces, each counted as a sample")
            for split in self.splits[:_SHOWN]:
                on, most = ", ".join(map(str, split.ranks)), max(split.tokens)
                rows.append(f"  sample {split.sample} of {split.length} tokens, at most {most} a piece, on ranks {on}")
            if len(self.splits) > _SHOWN:
                rows.append(f"  and {len(self.splits) - _SHOWN} that start later")
        rows.append(f"longest {self.longest:.5g}, mean {mean:.5g}, lower bound {self.bound:.5g}, gap {self.gap:.2%}")
        rows.append(
            f"predicted bubble {self.bubble:.1%} with a barrier per minibatch, {self.bubble_per_microbatch:.1%} per "
            f"microbatch, {self.bubble_bound:.1%} at the bound"
        )
        return "\n".join(rows)

    @property
    def split_ends(self) -> list[float]:
        """When each rank is done with its pieces: the pieces of one sample end together."""
        ends = [0.0] * len(self.ranks)
        for split in self.splits:
            start = max(ends[rank] for rank in split.ranks)
            for rank in split.ranks:
                ends[rank] = start + max(split.costs)
        return ends

    def _idle_share(self, step_time: float) -> float:
        mean = sum(self.rank_costs) / len(self.ranks)
        return max(0.0, 1.0 - mean / step_time) if step_time > 0 else 0.0
