"""Refinement: take cost from the costliest part by trading one or two of its samples for none, one or two of another's.

Chose a descent that looks only at the costliest part and a few of the cheapest over a search of all pairs: partitions
from Karmarkar-Karp or a heap are nearly even already, and one sorted list of bundles per part makes the best trade a
bisection. It stops in a local optimum; the plan's gap tells how far that may be from the best.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import combinations

_Bundle = tuple[float, tuple[int, ...]]  # cost and samples

_PARTNERS = 16  # cheapest parts tried against the costliest one
_NEIGHBOURS = 3  # bundles on either side of the ideal trade that are tried (the nearest may not fit under the cap)
_PAIRS_UP_TO = 12  # parts with more samples trade only single ones: they are fine-grained enough
_EPSILON = 1e-12  # share of a load below which a difference is rounding


def refine(
    parts: list[list[int]],
    costs: Sequence[float],
    *,
    lengths: Sequence[int] | None = None,
    max_tokens: int | None = None,
    floor: float = 0.0,
    everywhere: bool = False,
    worth: float = _EPSILON,
) -> list[list[int]]:
    """Parts with the same samples and loads at least as even; the costliest load never rises.

    Args:
        parts: lists of sample indices.
        costs: cost of every sample.
        lengths, max_tokens: with both, no trade lifts the sum of lengths of a part over `max_tokens`.
        floor: stop when the costliest load is not above this lower bound.
        everywhere: when the costliest part cannot be improved, go on with the next one, and so even out all parts.
        worth: a trade must lower the larger of two loads by at least this share of it; larger values end sooner.
    """
    descent = _Descent(parts, costs, lengths, max_tokens, worth)
    active = len(parts)
    # Each trade lowers the sum of squared loads, so this ends; the budget only bounds the time on odd inputs.
    for _ in range(20 * (len(costs) + len(parts))):
        heavy = descent.by_load[active - 1][1] if active else -1
        if active < 2 or descent.loads[heavy] <= floor * (1 + _EPSILON):
            break
        if descent.improve(heavy):
            continue
        if not everywhere:
            break
        active -= 1
    return descent.members


class _Descent:
    """Parts with their loads and tokens, an order by load, and the bundles each could trade."""

    def __init__(
        self,
        parts: list[list[int]],
        costs: Sequence[float],
        lengths: Sequence[int] | None,
        max_tokens: int | None,
        worth: float,
    ) -> None:
        capped = lengths is not None and max_tokens is not None
        self.costs = costs
        self.worth = worth
        self.lengths = lengths if capped and lengths is not None else [0] * len(costs)
        self.max_tokens = max_tokens if capped and max_tokens is not None else 0
        self.members = [sorted(part, key=lambda i: (-costs[i], i)) for part in parts]
        self.bundles: list[list[_Bundle] | None] = [None] * len(parts)
        self.loads = [self._cost(part) for part in self.members]
        self.tokens = [self._tokens(part) for part in self.members]
        self.by_load = sorted((load, part) for part, load in enumerate(self.loads))

    def improve(self, heavy: int) -> bool:
        """One trade between `heavy` and a cheaper part that lowers the larger of their loads; False if none does."""
        for load, light in self.by_load[:_PARTNERS]:
            if load >= self.loads[heavy]:
                return False
            if light != heavy and self._trade(heavy, light):
                return True
        return False

    def _trade(self, heavy: int, light: int) -> bool:
        """Make the trade that brings the two loads closest, if one brings them closer."""
        difference = self.loads[heavy] - self.loads[light]
        least = self.worth * self.loads[heavy]
        offers = self._bundles(light)
        best: tuple[float, tuple[int, ...], tuple[int, ...]] | None = None
        for cost, given in self._bundles(heavy):
            at = bisect_left(offers, (cost - difference / 2, ()))
            for price, taken in offers[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]:
                miss = abs(cost - price - difference / 2)
                if miss >= difference / 2 - least or (best is not None and miss >= best[0]):
                    continue
                if self._fits(heavy, light, given, taken):
                    best = (miss, given, taken)
        if best is None:
            return False
        self._apply(heavy, light, best[1], best[2])
        return True

    def _bundles(self, part: int) -> list[_Bundle]:
        """Nothing, each sample and, in small parts, each pair, by rising cost."""
        known = self.bundles[part]
        if known is None:
            members = self.members[part]
            sizes = (0, 1, 2) if len(members) <= _PAIRS_UP_TO else (0, 1)
            known = sorted((self._cost(some), some) for size in sizes for some in combinations(members, size))
            self.bundles[part] = known
        return known

    def _fits(self, heavy: int, light: int, given: tuple[int, ...], taken: tuple[int, ...]) -> bool:
        moved = self._tokens(given) - self._tokens(taken)
        return self.tokens[light] + moved <= self.max_tokens and self.tokens[heavy] - moved <= self.max_tokens

    def _apply(self, heavy: int, light: int, given: tuple[int, ...], taken: tuple[int, ...]) -> None:
        for part, leaving, coming in ((heavy, given, taken), (light, taken, given)):
            del self.by_load[bisect_left(self.by_load, (self.loads[part], part))]
            members = [*(i for i in self.members[part] if i not in leaving), *coming]
            self.members[part] = sorted(members, key=lambda i: (-self.costs[i], i))
            # Summed afresh: the same members give the same load to the last bit, whatever came before.
            self.loads[part] = self._cost(self.members[part])
            self.tokens[part] = self._tokens(self.members[part])
            self.bundles[part] = None
            insort(self.by_load, (self.loads[part], part))

    def _cost(self, samples: Sequence[int]) -> float:
        return float(sum(self.costs[i] for i in samples))

    def _tokens(self, samples: Sequence[int]) -> int:
        return sum(self.lengths[i] for i in samples)
