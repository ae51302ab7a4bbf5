"""Case of the batch exchange: rows of examples to the ranks that a plan gives them to.

Chose an even shuffle (every rank sends each rank as much) over a plan of real lengths: the bytes are then those asked
for, and the collectives are at their best.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from odc.bench import rivals
from odc.bench.crew import held
from odc.bench.rounds import Action
from odc.dispatch import Rearrangement
from odc.dispatch.exchange import AllGatherExchange, CollectiveExchange, Exchange, OnDemandExchange
from odc.dispatch.route import Route
from odc.fsdp import default_store

_WIDTH, _EXAMPLES = 256, 4  # features of a row; examples of each rank for each rank


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
    limit = rivals.copy(moved, device)
    against = (limit.name, *list(kinds)[1:])
    made = [
        Action(kind, _mover(one, route, given), moved, against if kind == "exchange" else ())
        for kind, one in kinds.items()
    ]
    return [*made, limit]


def _mover(one: Exchange, route: Route, given: dict[str, torch.Tensor]) -> Callable[[], object]:
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        one.move(step, "x", route, given)

    return run
