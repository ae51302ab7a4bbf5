"""The model of `events` for thousands of ranks: numpy over all microbatches or all ranks at once.

On demand with even shards, ranks do not affect each other between two meetings, so all microbatches are computed
together, use after use. Under collectives all ranks of a group take each use together.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from odc.errors import ConfigError
from odc.simulate.gangs import Pieces, compute_seconds
from odc.simulate.step import Step, StepResult

_Floats = NDArray[np.float64]


def simulate_vectorised(step: Step) -> StepResult:
    """The step; raises ConfigError where transfers on demand would queue at an owner or for the node cache."""
    if step.transport in ("on demand", "dynamic"):
        if step.cached:
            raise ConfigError("ranks wait for the same reads of the node cache, which only simulate_events does")
        if step.cluster.owner_skew > 1 and step.shards > 1:
            raise ConfigError("owner_skew above 1 makes transfers queue at owners, which only simulate_events does")
        return _on_demand(step)
    return _Lockstep(step).run()


class _Chain(NamedTuple):
    """Microbatches that run alone; arrays of shape (microbatches,), in seconds."""

    duration: _Floats  # from its start to the end of its compute
    arrived: _Floats  # from its start until its last gradient has arrived, if no older push delays it
    pushing: float  # that its pushes occupy the rank's link
    busy: _Floats
    transfer: _Floats  # waiting for fetches


def _chain(step: Step, seconds: _Floats, slow: _Floats, noise: _Floats | None) -> _Chain:
    """All microbatches at once, use after use, with times relative to the start of each."""
    cluster, pushing = step.cluster, 0.0
    now, arrived, busy, transfer = (np.zeros_like(seconds) for _ in range(4))
    fetched = start = now
    for k, use in enumerate(step.model.uses()):
        asked = now if use.first or not step.prefetch else start
        if use.fetch_bytes:
            fetched = asked + cluster.transfer_seconds(use.fetch_bytes, step.shards)
        else:
            fetched = asked
        start = np.maximum(now, fetched)
        transfer += start - now
        compute = compute_seconds(step, use.share, seconds, slow, None if noise is None else noise[:, k])
        busy += compute
        now = start + compute
        if use.push_bytes:
            one = cluster.transfer_seconds(use.push_bytes, step.shards, push=True)
            arrived = np.maximum(arrived, now) + one
            pushing += one
    return _Chain(now, np.maximum(arrived, now), pushing, busy, transfer)


def _on_demand(step: Step) -> StepResult:
    ranks, jobs, noise = step.cluster.ranks, step.jobs(), step.noise()
    slowness = np.array(step.cluster.slowness())
    if step.transport == "dynamic":
        return _dynamic(step, jobs, slowness, noise)
    pieces = Pieces(step, slowness, None if noise is None else noise[len(jobs) :])
    noise = None if noise is None else noise[: len(jobs)]
    counts = np.array([len(seconds) for seconds in step.seconds])
    owner = np.repeat(np.arange(ranks), counts)
    chain = _chain(step, jobs, slowness[owner], noise)
    begins = np.concatenate(([0], np.cumsum(counts)[:-1]))
    now, arrived = pieces.now, pieces.arrived
    for m in range(int(counts.max(initial=0))):
        on = np.flatnonzero(counts > m)
        at = begins[on] + m
        arrived[on] = np.maximum(now[on] + chain.arrived[at], arrived[on] + chain.pushing)
        now[on] += chain.duration[at]
    return _result(
        step,
        max(now.max(), arrived.max()),
        _by_rank(owner, chain.busy, ranks) + pieces.busy,
        _by_rank(owner, chain.transfer, ranks) + pieces.transfer,
        counts,
    )


def _dynamic(step: Step, jobs: _Floats, slowness: _Floats, noise: _Floats | None) -> StepResult:
    """A heap of when each rank is free; every microbatch's time on every kind of rank is known beforehand."""
    ranks, claim = step.cluster.ranks, step.cluster.claim_seconds()
    kinds, kind_of = np.unique(slowness, return_inverse=True)
    chains = [_chain(step, jobs, np.full_like(jobs, kind), noise) for kind in kinds]
    durations, arrivals = ([getattr(c, name).tolist() for c in chains] for name in ("duration", "arrived"))
    free = [(0.0, rank) for rank in range(ranks)]
    arrived, mine = [0.0] * ranks, np.zeros(len(jobs), np.int64)
    kind_list, pushing = kind_of.tolist(), [c.pushing for c in chains]
    for job in np.argsort(-jobs, kind="stable").tolist():
        now, rank = free[0]
        begin, kind = now + claim, kind_list[rank]
        arrived[rank] = max(begin + arrivals[kind][job], arrived[rank] + pushing[kind])
        mine[job] = rank
        heapq.heapreplace(free, (begin + durations[kind][job], rank))
    last = max(now for now, _ in free) + claim
    own_kind, at = kind_of[mine], np.arange(len(jobs))
    busy = _by_rank(mine, np.array([chain.busy for chain in chains])[own_kind, at], ranks)
    transfer = _by_rank(mine, np.array([chain.transfer for chain in chains])[own_kind, at], ranks)
    return _result(step, max(last, *arrived), busy, transfer, np.bincount(mine, minlength=ranks))


def _by_rank(owner: NDArray[np.int64], values: _Floats, ranks: int) -> _Floats:
    sums = np.zeros(ranks)
    np.add.at(sums, owner, values)
    return sums


class _Lockstep:
    """Collectives: all ranks of a group take each use of a unit together."""

    def __init__(self, step: Step) -> None:
        self.step, self.uses, self.noise = step, step.model.uses(), step.noise()
        self.counts = np.array(step.counts)
        self.real = np.array([len(seconds) for seconds in step.seconds])
        self.begins = np.concatenate(([0], np.cumsum(self.real)[:-1]))
        self.jobs = step.jobs()
        ranks = step.cluster.ranks
        self.slow = np.array(step.cluster.slowness())
        self.now, self.start, self.busy, self.transfer = (np.zeros(ranks) for _ in range(4))
        self.link = np.zeros(ranks // step.shards)  # when each group's last collective is over
        self.reductions: deque[tuple[_Floats, float]] = deque()  # when each is over by rank, and what it takes

    def run(self) -> StepResult:
        if self.step.transport == "resident":
            self._resident()
        else:
            self._every_microbatch()
        return _result(self.step, max(self.now.max(), self.link.max()), self.busy, self.transfer, self.counts)

    def _every_microbatch(self) -> None:
        called = 0.0  # bytes of the reduction that each rank called at `now`, after its last use
        count = int(self.counts.max())
        for m in range(count):
            reduces = m == count - 1 or not self.step.reduce_once
            for k, use in enumerate(self.uses):
                ahead = self.step.prefetch and not use.first
                asked = self.start
                if not ahead:  # a gather that does not run ahead is called after that reduction
                    self._reduce(called)
                    asked = self.now
                fetched, took = self._gather(asked, use.fetch_bytes)
                if ahead:
                    self._reduce(called)
                self._use(m, k, fetched, took, slice(None))
                called = use.push_bytes if reduces else 0.0
        self._reduce(called)

    def _resident(self) -> None:
        """Gather every unit, run all microbatches, and reduce in the backward of a dummy."""
        for use in self.uses:
            if not use.backward:
                fetched, took = self._gather(self.now, use.fetch_bytes)
                self._await(fetched, took)
        for m in range(int(self.real.max(initial=0))):
            for k in range(len(self.uses)):
                self._use(m, k, self.now, 0.0, np.flatnonzero(self.real > m))
        for k, use in enumerate(self.uses):
            self._use(self.real, k, self.now, 0.0, slice(None))
            self._reduce(use.push_bytes)

    def _await(self, fetched: _Floats, took: float) -> None:
        """Every rank waits until it has what takes `took` to gather."""
        gone_on = np.maximum(self.now, fetched)
        self.transfer += np.minimum(gone_on - self.now, took)
        self.now = gone_on

    def _use(
        self, m: int | NDArray[np.intp], k: int, fetched: _Floats, took: float, on: NDArray[np.intp] | slice
    ) -> None:
        """Wait for a gather that takes `took`, and compute use k of (each rank's) microbatch m, on some ranks."""
        now = self.now[on]
        start = np.maximum(now, fetched[on])
        self.transfer[on] += np.minimum(start - now, took)
        compute = self._seconds(m, k)[on]
        self.busy[on] += compute
        self.start = self.start.copy()
        self.start[on] = start
        self.now = self.now.copy()
        self.now[on] = start + compute

    def _seconds(self, m: int | NDArray[np.intp], k: int) -> _Floats:
        """Compute of use k in microbatch m by rank; a dummy takes only the fixed time."""
        real = np.flatnonzero(self.real > m)
        at = (self.begins + m)[real]
        seconds, noise = np.zeros(len(self.real)), np.ones(len(self.real))
        seconds[real] = self.jobs[at]
        if self.noise is not None:
            noise[real] = self.noise[at, k]
        return compute_seconds(self.step, self.uses[k].share, seconds, self.slow, noise)

    def _gather(self, asked: _Floats, nbytes: float) -> tuple[_Floats, float]:
        """When each rank has the unit, and the seconds its gather takes."""
        if not nbytes:
            return asked, 0.0
        took = self.step.cluster.gather_seconds(nbytes, self.step.shards)
        return self._collective(asked, took), took

    def _reduce(self, nbytes: float) -> None:
        """Each rank calls a reduction now, and continues once few enough of its reductions are under way."""
        if not nbytes:
            return
        took = self.step.cluster.gather_seconds(nbytes, self.step.shards, reduces=True)
        self.reductions.append((self._collective(self.now, took), took))
        if len(self.reductions) > self.step.cluster.reductions_in_flight:
            self._await(*self.reductions.popleft())

    def _collective(self, called: _Floats, seconds: float) -> _Floats:
        """When the collective is over on each rank, which the ranks called at `called`."""
        last = called.reshape(-1, self.step.shards).max(axis=1)
        self.link = np.maximum(last, self.link) + seconds
        return np.repeat(self.link, self.step.shards)


def _result(step: Step, met: float, busy: _Floats, transfer: _Floats, counts: NDArray[np.intp]) -> StepResult:
    seconds = float(met) + step.ending_seconds()
    busy = busy + step.model.optimizer_seconds
    ran: list[int] = counts.tolist()
    return StepResult(seconds, tuple(busy.tolist()), tuple(transfer.tolist()), tuple(ran), step.node_bytes(ran))
