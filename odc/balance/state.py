"""The data of the inner loops: samples by falling cost, and the parts they are spread over.

Fields hold numpy arrays for the compiled loops and plain lists for the interpreted ones. The samples of a part are a
linked list, so a sample changes its part in a few stores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

SPLIT = 16  # samples of two parts that are divided anew between them, exactly
_HALF = 1 << (SPLIT // 2)


class Assignment(NamedTuple):
    """n samples on k parts. Integers are below 2**53, so sums and products with 1.0 are exact in float64 too.

    Parts of one kind (same slowness and limit) are neighbours: kind q holds parts `kinds[q]` to `kinds[q + 1] - 1`.
    """

    costs: Any  # [n] cost of a sample, falling
    needs: Any  # [n] a sample may lie on parts whose limit is at least this
    sizes: Any  # [n] how much of its part's room a sample takes
    slowness: Any  # [k] time of one unit of cost: 1 / speed
    limits: Any  # [k]
    rooms: Any  # [k] most size a part may hold
    kinds: Any  # [kinds + 1]
    loads: Any  # [k] cost on a part
    used: Any  # [k] size on a part
    heads: Any  # [k] cheapest sample of a part, or -1
    links: Any  # [n] the next costlier sample of the same part, or -1
    order: Any  # [k] parts by rising time, when last sorted
    heap: Any  # [k] scratch
    spare: Any  # [k] scratch
    # Scratch: samples of the two parts at hand with their costs, and subset sums of two halves of a few samples.
    mine: Any  # [n + 1]
    theirs: Any  # [n + 1]
    mine_costs: Any  # [n + 1]
    their_costs: Any  # [n + 1]
    chosen: Any  # [SPLIT] samples to divide anew
    sums: Any  # [4 * 2**(SPLIT / 2)] two halves, each with a spare to merge from
    weights: Any  # [as sums] size of each subset
    masks: Any  # [as sums] the subset, one bit a sample


class Rules(NamedTuple):
    """What trades between parts are for."""

    goal: float  # a part that ends by then is left alone
    counts: bool = False  # no part changes its number of samples
    reach: int = 0  # samples on either side of the ideal trade that are tried; 0 where rooms forbid nothing
    worth: float = 0.0  # share by which a trade must lower the later end of two parts
    everywhere: bool = False  # where nothing helps the latest part, go on with the next
    partners: int = 64  # earliest parts that a late one tries, once rounds no longer help


def new_assignment(
    costs: Ints,
    slowness: Floats,
    *,
    arrays: bool,
    needs: Ints | None = None,
    sizes: Ints | None = None,
    limits: Ints | None = None,
    rooms: Ints | None = None,
) -> Assignment:
    """An assignment with no sample placed; `costs` falls, parts are listed kind after kind. Lists unless `arrays`."""
    n, k = len(costs), len(slowness)
    needs, sizes = (np.zeros(n, np.int64) if given is None else given for given in (needs, sizes))
    limits, rooms = (np.zeros(k, np.int64) if given is None else given for given in (limits, rooms))
    new_kind = (slowness[1:] != slowness[:-1]) | (limits[1:] != limits[:-1])
    kinds = np.array([0, *(np.flatnonzero(new_kind) + 1), k], np.int64)
    samples = np.empty((5, n + 1), np.int64)
    halves = np.empty((3, 4 * _HALF), np.int64)
    parts = np.zeros((6, k), np.int64)
    parts[2] = -1
    parts[3] = np.arange(k)
    fields = (costs, needs, sizes, slowness, limits, rooms, kinds, *parts[:3], samples[0, :n], *parts[3:])
    made = Assignment._make((*fields, *samples[1:], np.empty(SPLIT, np.int64), *halves))
    return made if arrays else Assignment._make(field.tolist() for field in made)


class Tree(NamedTuple):
    """n samples by falling cost and k parts, for the exact search."""

    costs: Any  # [n]
    needs: Any  # [n] a sample may lie on parts whose limit is at least this
    slowness: Any  # [k] time of one unit of cost
    limits: Any  # [k]
    quotas: Any  # [k] most samples of a part
    loads: Any  # [k] scratch, zeros
    filled: Any  # [k] scratch, zeros: number of samples
    chosen: Any  # [n + 1] scratch


def new_tree(costs: Ints, needs: Ints, slowness: Floats, limits: Ints, quotas: Ints, *, arrays: bool) -> Tree:
    """A tree with nothing placed; lists unless `arrays`."""
    n, k = len(costs), len(slowness)
    scratch = (*np.zeros((2, k), np.int64), np.empty(n + 1, np.int64))
    tree = Tree._make((costs, needs, slowness, limits, quotas, *scratch))
    return tree if arrays else Tree._make(field.tolist() for field in tree)
