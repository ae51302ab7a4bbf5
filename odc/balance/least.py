"""The inner loop of least-load-first under a cap: each sample to the cheapest part that has room.

Chose to look at every part for every sample over a heap of loads: near the cap most of the cheap parts are full, so
that a heap takes them off and puts them back again and again, and a plain scan compiles to a few nanoseconds a part.
The price is time that grows with samples x parts. As `odc.balance.loops`, it runs alike with numba and without.
"""

from __future__ import annotations

from typing import Any


def least_load_first(costs: Any, sizes: Any, room: int, loads: Any, used: Any, owners: Any) -> bool:
    """Write the part of every sample to `owners`; of equally cheap parts the first. False where one fits nowhere.

    Args:
        costs, sizes: [n] of the samples, in the order in which they are placed.
        room: the most size of a part.
        loads, used: [k] cost and size on every part; zeros, changed here.
        owners: [n] written.
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
