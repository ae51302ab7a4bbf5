"""Refinement: even out given parts by trades between pairs of them, under a cap.

Chose the trades of the partition engine (`odc.balance.loops`) over ones of its own; here parts may also have a limited
size. It stops in a local optimum: no trade of one sample for one or none, and no new division of the cheapest, helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from odc.balance import loops as _loops
from odc.balance.compiled import loops_of
from odc.balance.partition import falling, to_ticks
from odc.balance.state import Rules, new_state

_REACH = 3  # samples on either side of the ideal trade that are tried, because the nearest may not fit
_PARTNERS = 8


def refine(
    parts: list[list[int]],
    costs: Sequence[float],
    *,
    lengths: Sequence[int] | None = None,
    max_tokens: int | None = None,
    everywhere: bool = False,
    worth: float = 0.0,
) -> list[list[int]]:
    """Parts with the same samples and costs at least as even; the costliest never gets costlier.

    Args:
        parts: lists of sample indices.
        costs: cost of every sample.
        lengths, max_tokens: with both, no trade lifts the sum of lengths of a part over `max_tokens`.
        everywhere: when the costliest part cannot be improved, go on with the next one, and so even out all parts.
        worth: a trade must lower the larger of two costs by at least this share of it; larger values end sooner.
    """
    listed = [i for part in parts for i in part]  # few of all samples, perhaps: only theirs are read
    samples = np.array(listed, np.int64)
    owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    ticks = to_ticks(np.array([costs[i] for i in listed], np.float64), len(parts))
    order = falling(ticks, None)
    samples, owners = samples[order], owners[order]
    n, k = len(samples), len(parts)
    sizes, reach, rooms = np.zeros(n, np.int64), 0, np.zeros(k, np.int64)
    if lengths is not None and max_tokens is not None:
        sizes, reach = np.array([lengths[i] for i in listed], np.int64)[order], _REACH
        rooms[:] = max_tokens
    loops, arrays = loops_of(_loops, n)
    nothing = np.zeros(max(n, k), np.int64)
    state = new_state(ticks[order], nothing[:n], sizes, np.ones(k), nothing[:k], rooms, arrays=arrays)
    loops.put(state, owners if arrays else owners.tolist())
    loops.solve(state, Rules(0.0, False, reach, worth, everywhere, _PARTNERS))
    out: Any = owners if arrays else owners.tolist()
    loops.get(state, out)
    result: list[list[int]] = [[] for _ in parts]
    for i, owner in zip(samples.tolist(), out, strict=True):
        result[owner].append(i)
    return result
