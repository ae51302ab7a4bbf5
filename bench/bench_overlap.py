"""What fetching ahead and pushing behind backward do to a step of two ranks.

Eight units of 4 MiB, three microbatches a step. "real" computes matmuls on one thread a rank, so on two cores nothing
is idle that a background thread could use; "emulated" sleeps instead, for as long as an accelerator would keep the host
waiting, which leaves the cores free. Settings are measured in turn, `_ROUNDS` times. Ratios are to the setting that
does neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Literal

import pytest
import torch
from torch import nn

from bench.slept import Slept
from odc import Settings
from odc.bench.ranks import RankPool, held
from odc.bench.units import drop

UNITS, WIDTH, TOKENS, MICROBATCHES = 8, 1024, 256, 3
SLEPT_S = 0.012  # of one unit, forward and backward
_ROUNDS, _STEPS, _WARM = 3, 5, 1
Compute = Literal["real", "emulated"]
#: (units fetched ahead, push on a thread)
CHOICES = [(0, False), (1, False), (2, False), (0, True), (1, True), (2, True)]


class Layer(nn.Module):
    """A unit of 4 MiB."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.linear, self.compute = nn.Linear(WIDTH, WIDTH, bias=False), compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.compute == "real":
            return self.linear(x)
        y: torch.Tensor = Slept.apply(self.linear(x[:1]), SLEPT_S, 0)
        return y


def times(compute: Compute, settings: Settings) -> list[float]:
    """Seconds of `_STEPS` steps after a few to warm up. Every rank calls it."""
    from odc import fully_shard

    drop()
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(compute) for _ in range(UNITS)))
    for layer in model:
        fully_shard(layer, settings=settings)
    held.module = fully_shard(model, settings=settings)
    x, found = torch.randn(TOKENS, WIDTH), []
    for _ in range(_WARM + _STEPS):
        begin = time.perf_counter()
        with held.module.minibatch():
            for _ in range(MICROBATCHES):
                held.module(x).sum().backward()
        found.append(time.perf_counter() - begin)
        held.module.zero_grad()
    return found[_WARM:]


@pytest.mark.parametrize("compute", ["real", "emulated"])
def test_overlap(compute: Compute, pool: RankPool, note: Callable[..., None]) -> None:
    found: dict[tuple[int, bool], list[float]] = {choice: [] for choice in CHOICES}
    for _ in range(_ROUNDS):
        for prefetch, overlap in CHOICES:
            mine = pool.each(times, compute, Settings(prefetch=prefetch, push_overlap=overlap))[0]
            found[prefetch, overlap] += mine
    base = median(found[0, False])
    for (prefetch, overlap), seconds in found.items():
        note(
            compute=compute,
            prefetch=prefetch,
            push_overlap=overlap,
            step_ms=median(seconds) * 1e3,
            ratio=base / median(seconds),
            fastest_ms=min(seconds) * 1e3,
            steps=len(seconds),
        )
    pool.each(drop)
