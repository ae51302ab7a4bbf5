"""Loops that place samples one by one, compiled or interpreted: a bounded exact search, and least-load-first."""

from __future__ import annotations

from typing import Any

from odc.balance.state import Tree


def search(tree: Tree, owners: Any, ceiling: float, goal: float, worth: float, fullest: bool, steps: int) -> float:
    """Depth-first search for a placement whose latest part ends before `ceiling`, then for ever earlier ones.

    Each further placement must end earlier by the share `worth`; the search stops at `goal` or after `steps`
    placements. With `fullest` the fullest part that may take a sample is tried first, otherwise the emptiest. Parts
    that are alike and equally full are tried once, and a branch is left when the room that is left cannot hold the
    rest.

    Writes the part of every sample to `owners`; returns when the latest ends, or `ceiling` where nothing was found.
    """
    n, at, found = len(tree.costs), 0, ceiling
    under = ceiling
    tree.chosen[0] = -1
    while at >= 0:
        if at == n:
            found = _latest(tree)
            for i in range(n):
                owners[i] = tree.chosen[i]
            under = found * (1.0 - worth)
            if found <= goal:
                break
            at -= 1
            continue
        part = tree.chosen[at]
        if part >= 0:
            tree.loads[part] -= tree.costs[at]
            tree.filled[part] -= 1
        part = _next(tree, at, part, under, fullest)
        tree.chosen[at] = part
        if part < 0:
            at -= 1
            continue
        steps -= 1
        if steps < 0:
            break
        tree.loads[part] += tree.costs[at]
        tree.filled[part] += 1
        if _roomy(tree, at, under):
            at += 1
            tree.chosen[at] = -1
    return found


def _latest(tree: Tree) -> float:
    latest = 0.0
    for part in range(len(tree.loads)):
        latest = max(latest, tree.loads[part] * tree.slowness[part])
    return latest


def _next(tree: Tree, at: int, last: int, under: float, fullest: bool) -> int:
    """The part to try after `last` (-1: the first) for sample `at`, in order of (load, part); -1 when all were tried.

    Loads are as they were when `last` was chosen, so the order is the same. A part like `last` and equally full would
    lead to the same placements and is passed over.
    """
    sign = -1 if fullest else 1
    cost, best = tree.costs[at], -1
    for part in range(len(tree.loads)):
        load = sign * tree.loads[part]
        if last >= 0:
            gone = sign * tree.loads[last]
            if load < gone or (load == gone and (part <= last or _alike(tree, part, last))):
                continue
        if tree.limits[part] < tree.needs[at] or tree.filled[part] >= tree.quotas[part]:
            continue
        if (tree.loads[part] + cost) * tree.slowness[part] >= under:
            continue
        if best < 0 or load < sign * tree.loads[best]:
            best = part
    return best


def _alike(tree: Tree, one: int, other: int) -> bool:
    same: bool = (
        tree.slowness[one] == tree.slowness[other]
        and tree.limits[one] == tree.limits[other]
        and tree.quotas[one] == tree.quotas[other]
        and (tree.filled[one] == tree.filled[other] or tree.quotas[one] >= len(tree.costs))
    )
    return same


def _roomy(tree: Tree, at: int, under: float) -> bool:
    """Whether the samples after `at` may still fit, not counting room that is too small for the cheapest of them."""
    n = len(tree.costs)
    rest = 0
    for i in range(at + 1, n):
        rest += tree.costs[i]
    room = 0.0
    for part in range(len(tree.loads)):
        free = under / tree.slowness[part] - tree.loads[part]
        if free >= tree.costs[n - 1] and tree.filled[part] < tree.quotas[part]:
            room += free
    return room >= rest


def least_load_first(costs: Any, sizes: Any, room: int, loads: Any, used: Any, owners: Any) -> bool:
    """Put each sample on the cheapest part that has `room`, of equals the first. False where one fits nowhere.

    Changes `loads` and `used` (cost and size on each of k parts, zeros), and writes each sample's part to `owners`.
    """
    for i in range(len(costs)):
        most, chosen = room - sizes[i], -1
        for part in range(len(loads)):
            if used[part] <= most and (chosen < 0 or loads[part] < loads[chosen]):
                chosen = part
        if chosen < 0:
            return False
        owners[i] = chosen
        loads[chosen] += costs[i]
        used[chosen] += sizes[i]
    return True
