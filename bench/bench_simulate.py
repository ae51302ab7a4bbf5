"""How long the simulator takes for one step of 4096 ranks with 64 microbatches each.

Under "split" each rank runs six pieces of split samples before them.

The baseline is the time for each use of a unit of the reference simulator, on as many ranks as it simulates in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from odc.simulate import Cluster, Step, even_model, simulate_events, simulate_vectorised
from odc.simulate.workload import Gang

_LAYERS, _MICROBATCHES, _PIECES, _SMALL = 28, 64, 6, 16


def _gangs(ranks: int) -> list[Gang]:
    """Two samples on every block of 2, 4 and 8 neighbours."""
    blocks = [range(at, at + size) for size in (8, 4, 2) for at in range(0, ranks, size)]
    return [Gang(tuple(block), (1.0,) * len(block), 1e-4) for block in blocks * 2]


def _step(ranks: int, transport: str) -> Step:
    seconds = np.random.default_rng(0).lognormal(0.0, 0.8, (ranks, _MICROBATCHES)).tolist()
    cluster = Cluster(
        ranks, 8, intra_bandwidth=300e9, inter_bandwidth=12.5e9, intra_latency=3e-6, inter_latency=1e-5, jitter=0.05
    )
    model = even_model(_LAYERS, 3.1e9, root_bytes=0.9e9)
    if transport == "split":
        return Step(cluster, model, seconds, "on demand", gangs=_gangs(ranks))
    return Step(cluster, model, seconds, transport)  # type: ignore[arg-type]


def _seconds(run: Callable[[Step], Any], step: Step) -> float:
    begin = time.perf_counter()
    run(step)
    return time.perf_counter() - begin


@pytest.mark.parametrize("transport", ["collectives", "resident", "on demand", "dynamic", "split"])
def test_4096_ranks(transport: str, note: Callable[..., None]) -> None:
    ranks, pieces = 4096, _PIECES if transport == "split" else 0
    uses = 2 * (_LAYERS + 1) * (_MICROBATCHES + pieces)
    large, small = (
        _seconds(simulate_vectorised, _step(ranks, transport)),
        _seconds(simulate_events, _step(_SMALL, transport)),
    )
    note(
        transport=transport,
        ranks=ranks,
        microbatches=_MICROBATCHES,
        seconds=large,
        reference_us_a_use=1e6 * small / (_SMALL * uses),
        times_faster_a_use=(small / _SMALL) / (large / ranks),
    )
