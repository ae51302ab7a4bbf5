"""How a long sample is cut into pieces for several ranks: slices of its tokens, and the predicted cost of each piece.

A piece consists of slices `(start, stop)`. Attention is causal, so the cost of a slice is the cost of everything up to
its stop less the cost of everything up to its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from odc.balance.cost import Cost
from odc.errors import PlanError

Slices = list[tuple[int, int]]


@dataclass(frozen=True)
class SplitSample:
    """One sample of a plan that runs as pieces on several ranks.

    Args:
        sample: index of the sample.
        ranks: rank of each piece.
        slices: `slices[place]` lists the slices of the piece on `ranks[place]`, rising; together they cover the sample.
        costs: predicted cost of each piece, in the plan's unit.
    """

    sample: int
    ranks: list[int]
    slices: list[Slices]
    costs: list[float]

    @property
    def length(self) -> int:
        """Tokens of the whole sample."""
        return sum(self.tokens)

    @property
    def tokens(self) -> list[int]:
        """Tokens of each piece."""
        return [sum(stop - start for start, stop in slices) for slices in self.slices]

    def validate(self, ranks: int) -> None:
        """Raise PlanError unless the pieces lie on different ranks of `range(ranks)` and cover the sample once."""
        if len(self.ranks) < 2 or len(set(self.ranks)) < len(self.ranks):
            raise PlanError(f"split sample {self.sample} needs two or more different ranks, got {self.ranks}")
        if not all(0 <= rank < ranks for rank in self.ranks):
            raise PlanError(f"split sample {self.sample} lies on ranks {self.ranks}, but there are {ranks} ranks")
        if not len(self.ranks) == len(self.slices) == len(self.costs):
            raise PlanError(f"split sample {self.sample}: ranks, slices and costs differ in number")
        if not all(slices == sorted(slices) and slices for slices in self.slices):
            raise PlanError(f"split sample {self.sample}: every piece needs slices in rising order")
        end = 0
        for start, stop in sorted(one for slices in self.slices for one in slices):
            if start != end or stop <= start:
                raise PlanError(f"split sample {self.sample}: its slices leave out or repeat tokens near {start}")
            end = stop

    def to_dict(self) -> dict[str, Any]:
        """Its fields, as JSON holds them."""
        return {"sample": self.sample, "ranks": self.ranks, "slices": self.slices, "costs": self.costs}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> SplitSample:
        """The split that `to_dict` described; not validated."""
        return cls(
            sample=int(fields["sample"]),
            ranks=[int(rank) for rank in fields["ranks"]],
            slices=[[(int(start), int(stop)) for start, stop in slices] for slices in fields["slices"]],
            costs=[float(cost) for cost in fields["costs"]],
        )


def most_pieces(ranks: int) -> int:
    """The most pieces of one sample on so many ranks of a host: the largest power of two."""
    return 1 << (ranks.bit_length() - 1)


def longest_in_pieces(max_tokens: int, pieces: int) -> int:
    """Tokens of the longest sample that so many zig-zag pieces of up to `max_tokens`, 2 or more, hold."""
    return max_tokens * pieces


def longest_piece(length: int) -> int:
    """Tokens of the longest zig-zag piece of a sample of up to `length` tokens: there are two pieces or more."""
    return -(-length // 2)


def zigzag(length: int, pieces: int) -> list[Slices]:
    """Slices i and 2P - 1 - i of 2P equal ones: every piece costs the same, whatever attention costs next to the rest.

    A piece has length / P tokens, rounded up or down. The two slices in the middle of the sample are neighbours, so the
    last piece is one slice; so is one of a single token. A sample needs as many tokens as pieces.
    """
    first = [length * i // (2 * pieces) for i in range(pieces + 1)]
    second = [length - (length * i // pieces - first[i]) for i in range(pieces + 1)]
    pairs = [[(first[i], first[i + 1]), (second[i + 1], second[i])] for i in range(pieces)]
    pairs[-1] = [(first[-2], second[-2])]
    return [[one for one in pair if one[0] < one[1]] for pair in pairs]


def contiguous(length: int, pieces: int, cost: Cost) -> list[Slices]:
    """One slice a piece, each of nearly the same cost under `cost`; later pieces are shorter."""
    whole, edges = cost(length), [0]
    for place in range(1, pieces):
        low, high = edges[-1] + 1, length - (pieces - place)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if cost(middle) * pieces < whole * place else (low, middle)
        edges.append(low)
    edges.append(length)
    return [[(start, stop)] for start, stop in pairwise(edges)]


def costs_of(slices: Sequence[Slices], cost: Cost) -> list[float]:
    """Predicted cost of each piece: `cost` of every slice's prefix, less that of the tokens before the slice.

    PlanError where the cost of a longer prefix is smaller.
    """
    costs = [sum(cost(stop) - (cost(start) if start else 0.0) for start, stop in piece) for piece in slices]
    if min(costs) < 0.0:
        raise PlanError("lb_split needs a cost that does not fall where a sample gets longer")
    return costs
