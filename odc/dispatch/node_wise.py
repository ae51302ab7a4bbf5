"""Node-wise rearrangement (OrchMLLM, algorithm 3): put each new mini-batch on the node that already has most of it.

The objective is the paper's (equation 5): the most that any one instance sends to other nodes. The number of exchanges
follows from the budget and the sizes, never from a clock, because every rank plans for itself and all must agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from odc.balance.compiled import run_loop
from odc.balance.partition import falling
from odc.dispatch import node_loops as _loops
from odc.dispatch.rearrangement import Ints, Rearrangement
from odc.errors import PlanError

_NEAR_S, _FAR_S = 25e-9, 40e-9  # to look at one exchange, with volumes in the cache and outside of it (measured)
_CACHED = 512  # instances
_LEAST_STEPS = 64
_STEPS_EACH = 64  # times the instances: more steps found nothing better (measured), and small problems run uncompiled
_KICK = 2  # random exchanges after none helps


@dataclass(frozen=True, eq=False)
class NodeWise:
    """Where the new mini-batches go."""

    rearrangement: Rearrangement  # with the same mini-batches on other instances
    places: Ints  # int64 [d] the instance that gets what the given rearrangement had on each instance
    cost: int  # the most that any instance sends off its node
    before: int  # the same without this
    bound: float  # no placement has a lower cost

    @property
    def gap(self) -> float:
        """How far the cost is above the bound: cost / bound - 1."""
        return self.cost / self.bound - 1.0 if self.bound > 0 else float(self.cost > 0)


def node_wise(
    rearrangement: Rearrangement,
    sizes: ArrayLike,
    per_node: int,
    *,
    budget_s: float = 0.004,
) -> NodeWise:
    """Permute the new mini-batches of a rearrangement over the instances, so that little moves between nodes.

    Largest overlap first, then exchanges of two mini-batches.

    Args:
        rearrangement: of any post-balancing; what a mini-batch holds is not changed.
        sizes: int [n] volume of the example at each flat source place, in any unit.
        per_node: instances of a node; node a has instances a * per_node and following.
        budget_s: about how long the exchanges may take on a core of 2.5 GHz; it decides how many are tried.

    Raises PlanError for bad input.
    """
    known = np.asarray(sizes, np.int64)
    if len(known) != len(rearrangement.order) or (len(known) and known.min() < 0):
        raise PlanError(f"sizes must list a volume >= 0 for each of {len(rearrangement.order)} examples")
    given = rearrangement.sources, rearrangement.owners, known, rearrangement.instances, per_node
    places, cost, before = place_batches(*given, budget_s=budget_s)
    bound = _Placement.of(*given).bound() if before else 0.0
    return NodeWise(rearrangement.relabel(places), places, cost, before, bound)


def place_batches(
    senders: Ints,
    batches: Ints,
    sizes: Ints,
    instances: int,
    per_node: int,
    *,
    budget_s: float,
) -> tuple[Ints, int, int]:
    """`node_wise` for data in any place: instance `senders[e]` holds `sizes[e]` of batch `batches[e]`.

    Returns the instance of each batch, the cost, and the cost before.
    """
    if per_node < 1:
        raise PlanError(f"a node has at least one instance, not {per_node!r}")
    d, m = instances, -(-instances // per_node)
    if m == 1 or not len(sizes):
        return np.arange(d), 0, 0
    problem = _Placement.of(senders, batches, sizes, d, per_node)
    before = problem.most_sent(problem.node_of)
    affordable = max(_LEAST_STEPS, int(budget_s / problem.step_s))
    node = problem.exchange(min(affordable, _STEPS_EACH * d))
    cost = problem.most_sent(node)
    if cost > before:
        node, cost = problem.node_of, before
    return problem.seated(node), cost, before


@dataclass(frozen=True, eq=False)
class _Placement:
    """What each sender has of each batch, as the entries that are not zero and as a matrix."""

    batches: Ints  # int64 [e] as the next two, sorted by batch, then sender
    senders: Ints
    sizes: Ints
    totals: Ints  # int64 [d] all that a sender has
    per_node: int

    @classmethod
    def of(cls, senders: Ints, batches: Ints, sizes: Ints, instances: int, per_node: int) -> _Placement:
        keys = batches * instances + senders
        order = np.argsort(keys)
        key, first = np.unique(keys[order], return_index=True)
        summed = np.add.reduceat(sizes[order], first)
        totals = np.bincount(senders, weights=sizes, minlength=instances).astype(np.int64)
        return cls(key // instances, key % instances, summed, totals, per_node)

    @cached_property
    def node_of(self) -> Ints:
        """[d] node of each sender."""
        return np.arange(len(self.totals)) // self.per_node

    @cached_property
    def firsts(self) -> Ints:
        """[m + 1] first sender of each node, and d."""
        return np.append(np.arange(0, len(self.totals), self.per_node), len(self.totals))

    @property
    def rooms(self) -> Ints:
        """[m] batches that each node takes."""
        return np.diff(self.firsts)

    @cached_property
    def volume(self) -> Ints:
        """[d * d] what sender i has of batch j, at j * d + i."""
        volume = np.zeros(len(self.totals) ** 2, np.int64)
        volume[self.batches * len(self.totals) + self.senders] = self.sizes
        return volume

    @property
    def step_s(self) -> float:
        """About how long one step of exchanges takes, compiled, on one core of 2.5 GHz."""
        d = len(self.totals)
        return d * 1e-9 + len(self.sizes) / d * self.per_node * (_NEAR_S if d < _CACHED else _FAR_S)

    def most_sent(self, node: Ints) -> int:
        """The most any sender sends off its node, for batches on these nodes."""
        away = node[self.batches] != self.node_of[self.senders]
        sent = np.bincount(self.senders[away], weights=self.sizes[away], minlength=1)
        return int(sent.max())

    def overlaps(self) -> tuple[Ints, Ints, Ints]:
        """Batch, node, and what the node's senders have of the batch, the largest first."""
        m = len(self.firsts) - 1
        keys = self.batches * m + self.node_of[self.senders]  # sorted, as the entries are
        key, first = np.unique(keys, return_index=True)
        overlap = np.add.reduceat(self.sizes, first)
        falls = falling(overlap, None)
        return key[falls] // m, key[falls] % m, overlap[falls]

    def exchange(self, steps: int) -> Ints:
        """A good node of each batch, by largest overlap first and exchanges."""
        d = len(self.totals)
        pair_batch, pair_node, _ = self.overlaps()
        by_sender = np.argsort(self.senders.astype(np.int16) if d < 1 << 15 else self.senders, kind="stable")
        begins = np.concatenate([[0], np.cumsum(np.bincount(self.senders, minlength=d))])
        _, given = run_loop(_loops.place, len(self.sizes), pair_batch, pair_node, self.rooms, np.full(d, -1))
        node, scratch = np.asarray(given[-1], np.int64), np.empty((3, d), np.int64)
        fixed = self.volume, begins, self.batches[by_sender], self.firsts, self.node_of, self.totals.copy()
        _, given = run_loop(_loops.improve, len(self.sizes), *fixed, node, *scratch, steps, _KICK)
        return np.asarray(given[-3], np.int64)

    def bound(self) -> float:
        """Lower bound on what the busiest sender sends.

        A sender keeps at most as many of its batches as its node takes, its largest; the senders of a node together
        keep at most the largest of those of the whole node, and the most sent is at least their mean.
        """
        _, pair_node, overlap = self.overlaps()
        falls = falling(self.sizes, None)
        n, m = len(self.sizes), len(self.firsts) - 1
        room_of, none = self.rooms[self.node_of], np.zeros(len(self.totals), np.int64)
        _, alone = run_loop(_loops.kept, n, self.senders[falls], self.sizes[falls], room_of, none)
        _, together = run_loop(_loops.kept, n, pair_node, overlap, self.rooms, np.zeros(m, np.int64))
        means = (np.add.reduceat(self.totals, self.firsts[:-1]) - np.asarray(together[-1], np.int64)) / self.rooms
        return max(0.0, float((self.totals - np.asarray(alone[-1], np.int64)).max()), float(means.max()))

    def seated(self, node: Ints) -> Ints:
        """The instance of each batch: within its node, the one with most of it where possible."""
        d = len(node)
        scratch = np.empty(d, np.int64), np.zeros(d, np.int64), np.full(d, -1)
        _, given = run_loop(_loops.seat, len(self.sizes), self.volume, self.firsts, node, *scratch)
        return np.asarray(given[-1], np.int64)


def keep_local(
    owners: Ints, homes: Ints, lengths: Ints, instances: int, per_node: int, *, tolerance: float = 0.0
) -> Ints:
    """Destination instances, int64 [n], with the same lengths on every instance and more examples where they are.

    Of each length as many examples as possible stay on their instance, then as many as possible on their node.

    Args:
        owners: int64 [n] destination instance of each example.
        homes: int64 [n] instance that holds the example.
        lengths: int64 [n] >= 1.
        tolerance: examples may trade places if their lengths lie in one step of a ladder whose steps are this share
            wide; 0 for equal lengths only. A mini-batch's longest and sum of lengths grow by less than this share.
    """
    if not 0 <= tolerance < 1:
        raise PlanError(f"a tolerance is a share from 0 to below 1, not {tolerance!r}")
    n = len(lengths)
    if not n:
        return owners
    step = lengths if tolerance == 0 else _ladder(lengths, tolerance)
    order = np.argsort(step, kind="stable")
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(step[order])) + 1, [n]])
    scratch = np.full(instances, -1), np.empty(n, np.int64), np.zeros(n, np.int64), np.full(n, -1)
    _, given = run_loop(_loops.stay, n, order, cuts, homes, owners, per_node, *scratch)
    return np.asarray(given[-1], np.int64)


def _ladder(lengths: Ints, tolerance: float) -> Ints:
    """The step of the ladder for each length; steps begin at whole numbers."""
    begins, top = [1], int(lengths.max())
    while begins[-1] <= top:
        begins.append(max(begins[-1] + 1, int(begins[-1] * (1 + tolerance))))
    return np.searchsorted(np.array(begins), lengths, side="right")
