"""Node-wise rearrangement (algorithm 3): put each new mini-batch on the node that already has most of it.

Chose exchanges of batches, after longest-overlap-first placement, over the paper's integer program wherever the latter
would take longer than the budget: HiGHS needs seconds at 64 instances and never ends at thousands, exchanges take
milliseconds and end within a few percent of it. The price is a gap, which is reported against a lower bound.

The objective is the paper's (equation 5): the most that any one instance sends to other nodes. Which method runs is
decided from the numbers of instances and nodes, never from a clock: every rank plans for itself and all must agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from odc.balance.compiled import loops_of
from odc.dispatch import node_exact
from odc.dispatch import node_loops as _loops
from odc.dispatch.rearrangement import Ints, Rearrangement
from odc.errors import PlanError

Method = Literal["auto", "exact", "exchange"]
_STEPS_PER_S = 40_000  # exchanges looked for in a second, on one core of 2.5 GHz with 64 instances (measured)
_KICK = 2  # random exchanges after none helps


@dataclass(frozen=True, eq=False)
class NodeWise:
    """Where the new mini-batches go.

    Args:
        rearrangement: with the same mini-batches on other instances.
        places: int64 [d] the instance that gets what the given rearrangement had on each instance.
        cost: the most that any instance sends off its node.
        before: the same without this.
        bound: no placement has a lower cost.
        method: "exact" or "exchange".
    """

    rearrangement: Rearrangement
    places: Ints
    cost: int
    before: int
    bound: float
    method: str

    @property
    def gap(self) -> float:
        """How far the cost lies above the bound, cost / bound - 1; of the exact method 0."""
        return self.cost / self.bound - 1.0 if self.bound > 0 else float(self.cost > 0)


def node_wise(
    rearrangement: Rearrangement,
    sizes: ArrayLike,
    per_node: int,
    *,
    budget_s: float = 0.005,
    method: Method = "auto",
    linear_bound: bool = False,
) -> NodeWise:
    """Permute the new mini-batches of a rearrangement over the instances, so that little crosses nodes.

    Args:
        rearrangement: of any post-balancing; what a mini-batch holds is not changed.
        sizes: int [n] volume of the example at each flat source place, in any unit.
        per_node: instances of a node; node a has instances a * per_node and following.
        budget_s: about how long the planning may take; decides the method and how many exchanges are tried.
        method: "exact" (needs scipy), "exchange", or as the budget allows.
        linear_bound: report the bound of the linear relaxation (needs scipy), which is higher than the one of counting.

    Raises PlanError for bad input, and for the exact method without scipy. Pure: waits for nobody.
    """
    known = np.asarray(sizes, np.int64)
    if len(known) != len(rearrangement.order) or (len(known) and known.min() < 0):
        raise PlanError(f"sizes must list a volume >= 0 for each of {len(rearrangement.order)} examples")
    places, figures = place_batches(
        rearrangement.sources,
        rearrangement.owners,
        known,
        rearrangement.instances,
        per_node,
        budget_s=budget_s,
        method=method,
        linear_bound=linear_bound,
    )
    return NodeWise(rearrangement.relabel(places), places, *figures)


def place_batches(
    senders: Ints,
    batches: Ints,
    sizes: Ints,
    instances: int,
    per_node: int,
    *,
    budget_s: float,
    method: Method = "auto",
    linear_bound: bool = False,
) -> tuple[Ints, tuple[int, int, float, str]]:
    """`node_wise` for what lies anywhere: `sizes[e]` of batch `batches[e]` lies with `senders[e]`.

    Returns the instance of each batch, and (cost, cost before, bound, method).
    """
    if per_node < 1 or method not in ("auto", "exact", "exchange"):
        raise PlanError(f"a node has at least one instance and a method a name, not {per_node!r} and {method!r}")
    d = instances
    node_of = np.arange(d) // per_node
    firsts = np.append(np.arange(0, d, per_node), d)
    volume, totals = np.zeros(d * d, np.int64), np.zeros(d, np.int64)
    loops, arrays = loops_of(_loops, max(len(sizes), d * d // 16))
    if arrays:
        loops.scatter(senders, batches, sizes, d, volume, totals)
    else:
        np.add.at(volume, batches * d + senders, sizes)
        np.add.at(totals, senders, sizes)
    square = volume.reshape(d, d)
    before = _most_sent(square, node_of, node_of, totals)
    if method == "auto":
        method = "exact" if _exact_s(d, len(firsts) - 1) <= budget_s and _has_scipy() else "exchange"
    if len(firsts) == 2 or not before:
        node, bound = node_of, float(before)
    elif method == "exact":
        found, bound = node_exact.solve(square, np.diff(firsts), node_of)
        node = node_of if found is None else found
    else:
        steps = max(64, int(budget_s * _STEPS_PER_S * 64 / d))
        node = _exchange(square, volume, totals, node_of, firsts, steps)
        bound = counting_bound(square, firsts, totals)
    if linear_bound and method == "exchange" and len(firsts) > 2:
        bound = max(bound, node_exact.solve(square, np.diff(firsts), node_of, relaxed=True)[1])
    cost = _most_sent(square, node_of, node, totals)
    if cost > before:
        node, cost = node_of, before
    return _seated(volume, firsts, node), (cost, before, min(bound, float(cost)), method)


def counting_bound(volume: Ints, firsts: Ints, totals: Ints) -> float:
    """No placement lets all senders send less than this off their nodes.

    Args:
        volume: int64 [d batches, d senders].
        firsts: int64 [m + 1] first sender of each node.
        totals: int64 [d] all that a sender has.

    A sender keeps at most as many of its batches as its node takes, its largest; the senders of a node keep at most the
    largest of those of the whole node, so that the most sent is at least the mean of what they send.
    """
    bound = 0.0
    for begin, end in zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True):
        room, own = end - begin, volume[:, begin:end]
        alone = np.partition(own, len(own) - room, axis=0)[len(own) - room :].sum(axis=0)
        together = own.sum(axis=1)
        kept = np.partition(together, len(own) - room)[len(own) - room :].sum()
        bound = max(bound, float((totals[begin:end] - alone).max()), float(totals[begin:end].sum() - kept) / room)
    return bound


def _exchange(square: Ints, volume: Ints, totals: Ints, node_of: Ints, firsts: Ints, steps: int) -> Ints:
    """The node of each batch by largest overlap first and exchanges."""
    d, m = len(node_of), len(firsts) - 1
    overlap = np.add.reduceat(square, firsts[:-1], axis=1).ravel()
    some = np.flatnonzero(overlap)
    listed = some[np.argsort(-overlap[some], kind="stable")]
    given = [listed // m, listed % m, np.diff(firsts), volume, firsts, node_of, totals.copy()]
    scratch = [np.full(d, -1), np.empty(d, np.int64), np.empty(d, np.int64)]
    loops, arrays = loops_of(_loops, max(len(listed), d * d // 16))
    values: list[Any] = given + scratch
    if not arrays:
        values = [array.tolist() for array in values]
    pair_batches, pair_nodes, rooms, volumes, begins, nodes, sent, node, members, best = values
    loops.place(pair_batches, pair_nodes, rooms, node)
    loops.improve(volumes, begins, nodes, sent, node, members, best, steps, _KICK)
    return np.asarray(best, np.int64)


def _seated(volume: Ints, firsts: Ints, node: Ints) -> Ints:
    d = len(node)
    places, members, taken = np.full(d, -1), np.empty(d, np.int64), np.zeros(d, np.int64)
    loops, arrays = loops_of(_loops, d * d // 16)
    if arrays:
        loops.seat(volume, firsts, node, members, taken, places)
        return places
    out = places.tolist()
    loops.seat(volume.tolist(), firsts.tolist(), node.tolist(), members.tolist(), taken.tolist(), out)
    return np.asarray(out, np.int64)


def _most_sent(volume: Ints, node_of: Ints, node: Ints, totals: Ints) -> int:
    """The most any sender sends off its node, for batches on these nodes."""
    batches, senders = np.nonzero(volume)
    kept = node[batches] == node_of[senders]
    stays = np.zeros(len(totals), np.int64)
    np.add.at(stays, senders[kept], volume[batches[kept], senders[kept]])
    return int((totals - stays).max(initial=0))


def _exact_s(instances: int, nodes: int) -> float:
    """About how long HiGHS takes, from measurements on random lengths: it doubles with every 6 instances or so."""
    return 0.02 * 2.0 ** (instances / 6) if nodes > 1 else 0.0


def _has_scipy() -> bool:
    from importlib.util import find_spec

    return find_spec("scipy") is not None
