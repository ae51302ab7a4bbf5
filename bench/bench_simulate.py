"""How long the simulator takes for one step of 4096 ranks with 64 microbatches each.

The baseline is the time for each use of a unit of the reference simulator, on as many ranks as it simulates in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from odc.simulate import Cluster, Step, even_model, simulate_events, simulate_vectorised

_LAYERS, _MICROBATCHES, _SMALL = 28, 64, 16


def _step(ranks: int, transport: str) -> Step:
    seconds = np.random.default_rng(0).lognormal(0.0, 0.8, (ranks, _MICROBATCHES)).tolist()
    cluster = Cluster(
        ranks, 8, intra_bandwidth=300e9, inter_bandwidth=12.5e9, intra_latency=3e-6, inter_latency=1e-5, jitter=0.05
    )
    return Step(cluster, even_model(_LAYERS, 3.1e9, root_bytes=0.9e9), seconds, transport)  # type: ignore[arg-type]


def _seconds(run: Callable[[Step], Any], step: Step) -> float:
    begin = time.perf_counter()
    run(step)
    return time.perf_counter() - begin


@pytest.mark.parametrize("transport", ["collectives", "resident", "on demand", "dynamic"])
def test_4096_ranks(transport: str, note: Callable[..., None]) -> None:
    ranks, uses = 4096, 2 * (_LAYERS + 1) * _MICROBATCHES
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
