"""Cases of dispatching: planning against longest-first and Karmarkar-Karp, and the exchange of batches.

Lengths are LongAlign-like, costs verl's 24576 l + l^2. LPT (longest processing time first) is the engine's compiled
heap without trades. KK is `odc.balance.karmarkar_karp`, sparse and interpreted. The exchange is an even shuffle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from odc.balance import lb_micro, lb_mini, partition, partition_loops, quadratic
from odc.balance.compiled import loops_of
from odc.balance.karmarkar_karp import karmarkar_karp
from odc.balance.partition import falling, to_ticks
from odc.balance.state import Ints, new_assignment
from odc.bench import baselines
from odc.bench.ranks import held
from odc.bench.rounds import Action
from odc.dispatch import Rearrangement
from odc.dispatch.exchange import AllGatherExchange, CollectiveExchange, Exchange, OnDemandExchange
from odc.dispatch.route import Route
from odc.fsdp import default_store

COST = quadratic(24576, 1)
CAP = 65536
SAMPLES_A_RANK = 8
_WIDTH, _EXAMPLES = 256, 4  # features of a row; examples of each rank for each rank


def draw_lengths(samples: int, seed: int = 0) -> Ints:
    """int64 [samples]: lognormal with a mean near 16.5K tokens, clipped at 64K."""
    values = np.random.default_rng(seed).lognormal(math.log(12500), 0.8, samples)
    return np.clip(values, 16, CAP).astype(np.int64)


def plain_lpt(costs: Ints, parts: int) -> Ints:
    """int64 [samples]: owners by longest first without trades."""
    ticks = to_ticks(costs, parts)
    order = falling(ticks, None)
    state = new_assignment(ticks[order], np.ones(parts), arrays=True)
    compiled: Any = loops_of(partition_loops, len(costs))[0]
    compiled.longest_first(state, parts.bit_length())
    owners, result = np.empty(len(costs), np.int64), np.empty(len(costs), np.int64)
    compiled.get(state, owners)
    result[order] = owners
    return result


def sparse_kk(costs: Ints, parts: int, equal_sizes: bool = False) -> Ints:
    """int64 [samples]: owners by Karmarkar-Karp."""
    order = np.argsort(-costs, kind="stable").tolist()
    return owners_of(karmarkar_karp(costs.tolist(), parts, order, equal_sizes=equal_sizes), len(costs))


def owners_of(parts: list[list[int]], samples: int) -> Ints:
    """int64 [samples]: which part each sample is in."""
    owners = np.empty(samples, np.int64)
    for number, part in enumerate(parts):
        owners[part] = number
    return owners


def planners(samples: int, device: str) -> list[Action]:
    """`partition` of `samples` over an eighth as many parts, against its baselines; two policies beside."""
    parts = samples // SAMPLES_A_RANK
    lengths = draw_lengths(samples)
    costs, listed = 24576 * lengths + lengths**2, lengths.tolist()
    partition(np.arange(1000), 4)  # numba is loaded
    return [
        Action("partition", lambda: partition(costs, parts), against=("LPT", "KK")),
        Action("LPT", lambda: plain_lpt(costs, parts)),
        Action("KK", lambda: sparse_kk(costs, parts)),
        Action("lb_micro", lambda: lb_micro(listed, parts, CAP, COST), against=("KK",)),
        Action("lb_mini", lambda: lb_mini(listed, parts, CAP, COST), against=("KK",)),
    ]


def exchange(nbytes: int, device: str) -> list[Action]:
    """About `nbytes` of fp32 rows leave this rank and as many arrive; one-sided, by all-to-all, by all-gather."""
    world, rank, store = dist.get_world_size(), dist.get_rank(), default_store()
    examples = _EXAMPLES * world
    rows = max(1, nbytes // max(1, world - 1) // _EXAMPLES // (4 * _WIDTH))
    move = Rearrangement.to([examples] * world, np.arange(examples * world) % world)
    route = Route.of(move, {"rows": np.full(examples * world, rows)}, rank)
    given = {"rows": torch.full((rows * examples, _WIDTH), float(rank))}
    arena, name = 2 * given["rows"].nbytes, f"bench{nbytes}"
    kinds: dict[str, Exchange] = {
        "exchange": OnDemandExchange(store, range(world), rank, ["x"], arena_bytes=arena, name=f"{name}o"),
        "gloo all_to_all of rows": CollectiveExchange(store, name=f"{name}c"),
        "gloo all_gather of rows": AllGatherExchange(store, name=f"{name}a"),
    }
    held.closing = list(kinds.values())
    moved = rows * _EXAMPLES * (world - 1) * 4 * _WIDTH
    limit = baselines.copy(moved, device)
    against = (limit.name, *list(kinds)[1:])

    def moving(kind: str, one: Exchange, steps: Iterator[int]) -> Action:
        others = against if kind == "exchange" else ()
        return Action(kind, lambda: one.move(next(steps), "x", route, given), moved, others)

    return [*(moving(kind, one, itertools.count(1)) for kind, one in kinds.items()), limit]
