"""Pieces of split samples on all ranks at once, for `vectorised`.

Gangs that share no rank do not affect each other. So each gang comes in the first round after those of the earlier
gangs that share a rank with it, and the gangs of a round are computed together, use after use.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from odc.simulate.step import Step
from odc.simulate.workload import Gang

_Floats = NDArray[np.float64]


def compute_seconds(step: Step, share: float, seconds: _Floats, slow: _Floats, noise: _Floats | None) -> _Floats:
    """Compute of one use of a unit that takes `share` of jobs of `seconds`, on ranks of factor `slow`."""
    scaled = seconds * share if noise is None else seconds * share * noise
    return (scaled + step.model.unit_seconds) * slow


class Pieces:
    """When each rank is done with its pieces, and what it did until then; arrays of shape (ranks,), in seconds.

    `noise` has a row for each piece, gang after gang.
    """

    def __init__(self, step: Step, slow: _Floats, noise: _Floats | None) -> None:
        self._step, self._slow, self._noise = step, slow, noise
        ranks = step.cluster.ranks
        self.now, self.arrived, self.busy, self.transfer = (np.zeros(ranks) for _ in range(4))
        rows = list(accumulate((len(gang.ranks) for gang in step.gangs), initial=0))
        for numbers in _rounds(step.gangs, ranks):
            self._run([step.gangs[n] for n in numbers], [range(rows[n], rows[n + 1]) for n in numbers])

    def _run(self, gangs: list[Gang], rows: list[range]) -> None:
        """Gangs without a common rank, each from when its ranks are free."""
        step, cluster = self._step, self._step.cluster
        sizes = np.array([len(gang.ranks) for gang in gangs])
        begins = np.cumsum(sizes) - sizes
        ranks = np.array([rank for gang in gangs for rank in gang.ranks])
        seconds = np.array([second for gang in gangs for second in gang.seconds])
        noise = None if self._noise is None else self._noise[[row for one in rows for row in one]]
        now, slow = self.now[ranks], self._slow[ranks]
        start = now
        for k, use in enumerate(step.model.uses()):
            asked = now if use.first or not step.prefetch else start
            took = cluster.transfer_seconds(use.fetch_bytes, step.shards) if use.fetch_bytes else 0.0
            start = np.maximum(now, asked + took)
            self.transfer[ranks] += start - now
            exchanges = [step.exchange_seconds(gang, use) for gang in gangs]
            if exchanges[0] is not None:
                exchange = np.repeat(np.array(exchanges), sizes)
                start = np.repeat(np.maximum.reduceat(start, begins), sizes) + exchange
                self.transfer[ranks] += exchange
            compute = compute_seconds(step, use.share, seconds, slow, None if noise is None else noise[:, k])
            self.busy[ranks] += compute
            now = start + compute
            if use.push_bytes:
                one = cluster.transfer_seconds(use.push_bytes, step.shards, push=True)
                self.arrived[ranks] = np.maximum(self.arrived[ranks], now) + one
        self.now[ranks] = now


def _rounds(gangs: Sequence[Gang], ranks: int) -> list[list[int]]:
    """Numbers of the gangs that are computed together."""
    after, rounds = [0] * ranks, list[list[int]]()
    for number, gang in enumerate(gangs):
        at = max(after[rank] for rank in gang.ranks)
        rounds += [[]] * (at == len(rounds))
        rounds[at] = [*rounds[at], number]
        for rank in gang.ranks:
            after[rank] = at + 1
    return rounds
