"""The simulator: every rank is a generator that reads like the training loop, and one clock runs them all.

* A rank uses units in order. It may begin the fetch (or gather) of the next unit when it starts to compute this one,
  within one pass. Pushes start after a unit's backward and delay nothing but the end of the step.
* Collectives of a group run one after the other, each once its last rank has called it. Reductions start after a unit's
  backward; a rank with more than `Cluster.reductions_in_flight` unfinished ones waits.
* With resident parameters, all units are gathered one after the other before the first microbatch, and all
  reductions follow the last one, in the backward of a dummy.
* On demand, a rank has one fetch and one push at a time. Where an owner holds more than its share, transfers queue at
  it in the order they began, separately for each direction.
* With the node cache, the first rank of a node that needs a unit has the node read the others' shards, one unit after
  the other over the node's link; all its ranks then copy from the node's memory, where they also add their gradients.
* Split samples come first. Their pieces begin to compute a unit together, once each rank has the unit and keys and
  values are exchanged. Other ranks do not wait for them.
* The step ends `Step.ending_seconds` after all ranks have computed and all gradients have arrived.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate

from odc.simulate.step import Step, StepResult
from odc.simulate.workload import Use


@dataclass(slots=True)
class _Transfer:
    """A transfer under way. `done` is None until a collective's last rank has called it."""

    seconds: float
    done: float | None
    arrived: int = 0
    waiting: list[int] = field(default_factory=list)


#: What a rank does: it yields seconds that it computes, or a transfer that it waits for.
_Program = Generator[float | _Transfer, None, None]


def simulate(step: Step) -> StepResult:
    """One step, event by event."""
    return _Simulation(step).run()


class _Simulation:
    def __init__(self, step: Step) -> None:
        self.step, self.cluster, self.uses = step, step.cluster, step.model.uses()
        self.shards, self.cached = step.shards, step.cached
        self.on_demand = step.transport in ("on demand", "dynamic")
        ranks = self.cluster.ranks
        self.slow = self.cluster.slowness()
        self.busy, self.transfer, self.ran = [0.0] * ranks, [0.0] * ranks, [0] * ranks
        self.now = 0.0
        self.last_arrival = 0.0  # of a gradient
        self.events = [(0.0, rank) for rank in range(ranks)]  # a heap: when to go on with which rank
        self.programs = [self._rank(rank) for rank in range(ranks)]
        self.free: dict[tuple[str, int], float] = {}  # link, owner or group -> when it is free
        self.calls: dict[tuple[int, int], _Transfer] = {}  # (group, number) -> collective
        self.called = [0] * ranks
        self.exchanges: dict[tuple[int, int], _Transfer] = {}  # (gang, use) -> its exchange
        self.reductions: list[deque[_Transfer]] = [deque() for _ in range(ranks)]
        noise, jobs = step.noise(), step.jobs().tolist()
        self.first_piece = list(accumulate((len(gang.ranks) for gang in step.gangs), initial=len(jobs)))
        costliest_first = sorted(range(len(jobs)), key=lambda i: -jobs[i])
        jobs += [seconds for gang in step.gangs for seconds in gang.seconds]
        self.jobs = [(seconds, None if noise is None else noise[i].tolist()) for i, seconds in enumerate(jobs)]
        self.queue = deque(costliest_first)
        self.transfer_seconds = cache(partial(self.cluster.transfer_seconds, shards=step.shards))
        self.gather_seconds = cache(partial(self.cluster.gather_seconds, shards=step.shards))

    def run(self) -> StepResult:
        while self.events:
            self.now, rank = heapq.heappop(self.events)
            wish = next(self.programs[rank], None)
            if isinstance(wish, float):
                heapq.heappush(self.events, (self.now + wish, rank))
            elif wish is not None and wish.done is None:
                wish.waiting.append(rank)
            elif wish is not None:
                heapq.heappush(self.events, (max(self.now, wish.done or 0.0), rank))
        optimizer = self.step.model.optimizer_seconds
        end = max(self.now, self.last_arrival) + self.step.ending_seconds()
        busy, crossed = tuple(b + optimizer for b in self.busy), self.step.node_bytes(self.ran)
        return StepResult(end, busy, tuple(self.transfer), tuple(self.ran), crossed)

    def _rank(self, rank: int) -> _Program:
        if self.step.transport == "dynamic":
            while self.queue:
                job = self.queue.popleft()
                yield self.cluster.claim_seconds()
                yield from self._microbatch(rank, job, last=False)
            yield self.cluster.claim_seconds()  # the claim that finds nothing left
            return
        for number, gang in enumerate(self.step.gangs):
            if rank in gang.ranks:
                yield from self._piece(rank, number)
        begin = sum(map(len, self.step.seconds[:rank]))
        real, count = len(self.step.seconds[rank]), self.step.counts[rank]
        if self.step.transport == "resident":
            for use in self.uses:
                if not use.backward:
                    yield from self._wait(rank, self._fetch(rank, use))
        for m in range(count):
            yield from self._microbatch(rank, begin + m if m < real else None, last=m == count - 1)

    def _microbatch(self, rank: int, job: int | None, *, last: bool) -> _Program:
        self.ran[rank] += 1
        resident = self.step.transport == "resident"
        ahead: _Transfer | None = None
        for k, use in enumerate(self.uses):
            if not resident:
                yield from self._wait(rank, ahead or self._fetch(rank, use))
            ahead = None
            following = self.uses[k + 1] if k + 1 < len(self.uses) else None
            if self.step.prefetch and following is not None and not following.first and not resident:
                ahead = self._fetch(rank, following)
            seconds = self._compute_seconds(rank, job, k)
            self.busy[rank] += seconds
            yield seconds
            if use.push_bytes and (last or not self.step.reduces_last):
                yield from self._push(rank, use)

    def _piece(self, rank: int, number: int) -> _Program:
        gang, ahead = self.step.gangs[number], None
        job = self.first_piece[number] + gang.ranks.index(rank)
        for k, use in enumerate(self.uses):
            yield from self._wait(rank, ahead or self._fetch(rank, use))
            exchange = self.step.exchange_seconds(gang, use)
            if exchange is not None:
                yield from self._wait(rank, self._meet(number, k, exchange))
            following = self.uses[k + 1] if k + 1 < len(self.uses) else None
            prefetch = self.step.prefetch and following is not None and not following.first
            ahead = self._fetch(rank, following) if prefetch and following is not None else None
            seconds = self._compute_seconds(rank, job, k)
            self.busy[rank] += seconds
            yield seconds
            if use.push_bytes:
                yield from self._push(rank, use)

    def _meet(self, number: int, k: int, seconds: float) -> _Transfer:
        """The exchange of a gang in use k; its last rank starts it."""
        exchange = self.exchanges.setdefault((number, k), _Transfer(seconds, None))
        exchange.arrived += 1
        if exchange.arrived == len(self.step.gangs[number].ranks):
            del self.exchanges[number, k]
            exchange.done = self.now + seconds
            for waiting in exchange.waiting:
                heapq.heappush(self.events, (exchange.done, waiting))
        return exchange

    def _wait(self, rank: int, unit: _Transfer) -> Iterator[_Transfer]:
        asked = self.now
        yield unit
        self.transfer[rank] += min(self.now - asked, unit.seconds)

    def _compute_seconds(self, rank: int, job: int | None, k: int) -> float:
        """Compute time of use k of a unit in a job; a dummy (None) takes only the fixed time."""
        seconds, noise = self.jobs[job] if job is not None else (0.0, None)
        seconds *= self.uses[k].share * (noise[k] if noise is not None else 1.0)
        return (seconds + self.step.model.unit_seconds) * self.slow[rank]

    def _fetch(self, rank: int, use: Use) -> _Transfer:
        if not use.fetch_bytes:
            return _Transfer(0.0, self.now)
        if self.on_demand:
            return self._send("fetch", rank, use.fetch_bytes, use.unit)
        return self._collective(rank, self.gather_seconds(use.fetch_bytes))

    def _push(self, rank: int, use: Use) -> Iterator[_Transfer]:
        if self.on_demand:
            done = self._send("push", rank, use.push_bytes, use.unit).done or 0.0
            self.last_arrival = max(self.last_arrival, done)
            return
        pending = self.reductions[rank]
        seconds = self.gather_seconds(use.push_bytes, reduces=True)
        pending.append(self._collective(rank, seconds))
        if len(pending) > self.cluster.reductions_in_flight:
            yield from self._wait(rank, pending.popleft())

    def _collective(self, rank: int, seconds: float) -> _Transfer:
        """The rank's next collective; its last caller starts it."""
        group, number = rank // self.shards, self.called[rank]
        self.called[rank] += 1
        call = self.calls.setdefault((group, number), _Transfer(seconds, None))
        call.arrived += 1
        if call.arrived == self.shards:
            del self.calls[group, number]
            call.done = self._serve("collective", group, self.now, seconds)
            self.last_arrival = max(self.last_arrival, call.done)
            for waiting in call.waiting:
                heapq.heappush(self.events, (call.done, waiting))
        return call

    def _send(self, kind: str, rank: int, nbytes: float, unit: int) -> _Transfer:
        """One unit between a rank and its owners."""
        shards, cluster = self.shards, self.cluster
        if self.cached:
            return self._through_cache(kind, rank, nbytes, unit)
        seconds = self.transfer_seconds(nbytes, push=kind == "push")
        begin = max(self.now, self.free.get((kind, rank), 0.0))
        done = self._serve(kind, rank, begin, seconds)
        if cluster.owner_skew > 1 and shards > 1:
            near, far = cluster.owner_seconds(nbytes, shards)
            node = rank // cluster.node
            served = [self._serve(f"{kind} near", node, begin, near), self._serve(f"{kind} far", 0, begin, far)]
            if kind == "push":
                adding = nbytes * min(1.0, cluster.owner_skew / shards) / cluster.accumulate_bandwidth
                served.append(self._serve("server", rank // shards, begin, adding))
            done = max(done, max(served) + cluster.latency(shards))
        return _Transfer(done - begin, done)

    def _through_cache(self, kind: str, rank: int, nbytes: float, unit: int) -> _Transfer:
        """One unit between a rank and the memory of its node, which the node may have to read first."""
        began, there = max(self.now, self.free.get((kind, rank), 0.0)), 0.0
        if kind == "fetch":
            key = f"unit {unit}", rank // self.cluster.node
            if key not in self.free:  # when the unit is in the cache
                self.free[key] = self._serve("node", key[1], self.now, self.cluster.read_seconds(nbytes))
            there = self.free[key]
        seconds = self.cluster.memory_seconds(nbytes, self.step.shards, push=kind == "push")
        done = self._serve(kind, rank, max(began, there), seconds)
        return _Transfer(done - began, done)

    def _serve(self, resource: str, number: int, asked: float, seconds: float) -> float:
        """When `resource`, which serves in order of arrival, is done with something that takes `seconds`."""
        done = max(asked, self.free.get((resource, number), 0.0)) + seconds
        self.free[resource, number] = done
        return done
