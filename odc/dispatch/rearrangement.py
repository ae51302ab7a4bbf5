"""Which example goes where: from (source instance, slot) to (destination instance, slot).

An instance is a data-parallel rank, a slot the place of an example in an instance's mini-batch, and a flat place counts
the slots of instance 0, then of instance 1, and so on. A rearrangement is one permutation of flat places (OrchMLLM,
section 5.1), so its inverse and composition are one indexing each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from odc.errors import PlanError

Ints = NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Rearrangement:
    """A bijection between the examples of d source and d destination mini-batches. Immutable."""

    counts: Ints  # int64 [d] examples of each source instance
    new_counts: Ints  # int64 [d] examples of each destination instance; the sums agree
    order: Ints  # int64 [n] the flat source place of what comes to each flat destination place

    @classmethod
    def identity(cls, counts: ArrayLike) -> Rearrangement:
        """Everything stays where it is."""
        known = _counts(counts)
        return cls(known, known, np.arange(known.sum()))

    @classmethod
    def to(cls, counts: ArrayLike, owners: ArrayLike) -> Rearrangement:
        """Move the example at each flat source place to the instance in `owners` [n]; slots keep the source's order.

        Raises PlanError for owners of another number, or out of range.
        """
        known, owner = _counts(counts), np.asarray(owners)
        if len(owner) != known.sum():
            raise PlanError(f"{known.sum()} examples on {len(known)} instances, but {len(owner)} owners")
        if len(owner) and not (owner.min() >= 0 and owner.max() < len(known)):
            raise PlanError(f"an owner lies outside the {len(known)} instances")
        small = owner.astype(np.int16) if len(known) < 1 << 15 else owner  # numpy sorts these by radix
        return cls(known, np.bincount(owner, minlength=len(known)), np.argsort(small, kind="stable"))

    def __post_init__(self) -> None:
        for name in ("counts", "new_counts", "order"):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), np.int64))
        if len(self.counts) != len(self.new_counts):
            raise PlanError(f"{len(self.counts)} source instances, but {len(self.new_counts)} destinations")
        if not self.counts.sum() == self.new_counts.sum() == len(self.order):
            raise PlanError(
                f"{self.counts.sum()} examples leave, {self.new_counts.sum()} arrive and {len(self.order)} are listed"
            )

    @property
    def instances(self) -> int:
        return len(self.counts)

    @cached_property
    def starts(self) -> Ints:
        """[d + 1] flat source place of each instance's slot 0, and n."""
        return _starts(self.counts)

    @cached_property
    def new_starts(self) -> Ints:
        """[d + 1] flat destination place of each instance's slot 0, and n."""
        return _starts(self.new_counts)

    @cached_property
    def sources(self) -> Ints:
        """[n] source instance of each flat source place."""
        return np.repeat(np.arange(self.instances), self.counts)

    @cached_property
    def owners(self) -> Ints:
        """[n] destination instance of each flat source place."""
        owners = np.empty(len(self.order), np.int64)
        owners[self.order] = np.repeat(np.arange(self.instances), self.new_counts)
        return owners

    def arriving(self, instance: int) -> Ints:
        """Flat source places of what `instance` gets, slot by slot."""
        return self.order[self.new_starts[instance] : self.new_starts[instance + 1]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rearrangement):
            return NotImplemented
        mine, theirs = (self.counts, self.new_counts, self.order), (other.counts, other.new_counts, other.order)
        return all(np.array_equal(one, another) for one, another in zip(mine, theirs, strict=True))

    __hash__ = None  # type: ignore[assignment]  # arrays are compared, not hashed

    def inverse(self) -> Rearrangement:
        """Back to where everything came from."""
        back = np.empty_like(self.order)
        back[self.order] = np.arange(len(self.order))
        return Rearrangement(self.new_counts, self.counts, back)

    def compose(self, first: Rearrangement) -> Rearrangement:
        """`self` after `first`, as one move: with Pi_Ek for `first`'s inverse this is Pi_M o Pi_Ek^-1 (section 6).

        Raises PlanError unless `first` leaves as many examples on each instance as `self` starts from.
        """
        if not np.array_equal(first.new_counts, self.counts):
            raise PlanError(
                f"cannot compose: the first leaves {_short(first.new_counts)} examples by instance, the second "
                f"starts from {_short(self.counts)}"
            )
        return Rearrangement(first.counts, self.new_counts, first.order[self.order])

    def apply(self, batches: Sequence[Sequence[T]]) -> list[list[T]]:
        """The new mini-batches, for mini-batches [d][counts[i]] of anything. The reference of every exchange."""
        if [len(batch) for batch in batches] != self.counts.tolist():
            raise PlanError(f"mini-batches of {[len(b) for b in batches]} examples, not {_short(self.counts)}")
        flat = [example for batch in batches for example in batch]
        return [[flat[i] for i in self.arriving(instance).tolist()] for instance in range(self.instances)]

    def take(self, values: ArrayLike) -> NDArray[np.generic]:
        """Values [n, ...] by flat source place, in order of flat destination place."""
        return np.asarray(values)[self.order]

    def lift(self, parts: ArrayLike) -> Rearrangement:
        """The same move for parts of examples, `parts[i]` of the example at flat place i: each goes with it."""
        number = np.asarray(parts, np.int64)
        if len(number) != len(self.order) or (len(number) and number.min() < 0):
            raise PlanError(f"parts must list a number >= 0 for each of {len(self.order)} examples")
        first, moved = _starts(number), number[self.order]
        order = ranges(first[self.order], moved)
        return Rearrangement(_sums(number, self.starts), _sums(moved, self.new_starts), order)

    def relabel(self, places: ArrayLike) -> Rearrangement:
        """The same mini-batches on other instances: what instance j got, instance `places[j]` gets."""
        place = np.asarray(places, np.int64)
        if not np.array_equal(np.sort(place), np.arange(self.instances)):
            raise PlanError(f"places must be a permutation of {self.instances} instances")
        at = np.argsort(place)  # the old instance whose mini-batch each instance gets
        moved = self.new_counts[at]
        return Rearrangement(self.counts, moved, self.order[ranges(self.new_starts[at], moved)])

    def between_nodes(self, sizes: ArrayLike, per_node: int) -> Ints:
        """[d]: what each instance sends to instances of other nodes, nodes being runs of `per_node` instances."""
        away = self.sources // per_node != self.owners // per_node
        sent = np.zeros(self.instances, np.int64)
        np.add.at(sent, self.sources[away], np.asarray(sizes, np.int64)[away])
        return sent


def ranges(first: Ints, counts: Ints) -> Ints:
    """first[0], first[0] + 1, ... for counts[0] numbers, then from first[1] on, and so on."""
    return np.repeat(first - _starts(counts)[:-1], counts) + np.arange(counts.sum())


def _counts(counts: ArrayLike) -> Ints:
    known = np.asarray(counts, np.int64)
    if known.ndim != 1 or not len(known) or known.min() < 0:
        raise PlanError("counts must list a number of examples >= 0 for at least one instance")
    return known


def _starts(counts: Ints) -> Ints:
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _sums(values: Ints, starts: Ints) -> Ints:
    """[d] sums of the values between starts."""
    total = _starts(values)
    return total[starts[1:]] - total[starts[:-1]]


def _short(counts: Ints) -> str:
    return str(counts.tolist()) if len(counts) <= 16 else f"{counts[:16].tolist()[:-1]}... ({len(counts)} instances)"
