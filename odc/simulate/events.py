"""The simulator: what one step is, as the arrays that `event_loops` runs.

* A rank uses units in order. It may begin the fetch (or gather) of the next unit when it starts to compute this one,
  within one pass. Pushes start after a unit's backward and delay nothing but the end of the step.
* Collectives of a group run one after the other, each once its last rank has called it. Reductions start after a unit's
  backward; a rank with more than `Cluster.reductions_in_flight` unfinished ones waits.
* With resident parameters, all units are gathered one after the other before the first microbatch, and all
  reductions follow the last one, in the backward of a dummy.
* On demand, a rank has one fetch and one push at a time. Where an owner holds more than its share, transfers queue at
  it in the order in which ranks ask for them, separately for each direction.
* With the node cache, the first rank of a node that needs a unit has the node read the others' shards, one unit after
  the other over the node's link; all its ranks then copy from the node's memory, where they also add their gradients.
* Split samples come first. Their pieces begin to compute a unit together, once each rank has the unit and keys and
  values are exchanged. Other ranks do not wait for them.
* The step ends `Step.ending_seconds` after all ranks have computed and all gradients have arrived.
"""

from __future__ import annotations

import math
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odc.balance.compiled import loops_of
from odc.simulate import event_loops
from odc.simulate.event_loops import GATHER, JOINT, NEXT, RANK, STEP, USE, EventState
from odc.simulate.step import Step, StepResult
from odc.simulate.workload import Use

_USES_PER_SAMPLE = 256  # uses of units that take as long to simulate as planners spend on a sample


def simulate(step: Step) -> StepResult:
    """One step, event by event."""
    state = _state(step)
    loops, arrays = loops_of(event_loops, len(state.jobs) * len(state.uses) // _USES_PER_SAMPLE)
    if not arrays:
        state = EventState(*map(_listed, state))
    loops.run(state)
    ranks, end = state.ranks, state.step[0]
    optimizer, ran = step.model.optimizer_seconds, tuple(int(rank.ran) for rank in ranks)
    return StepResult(
        seconds=float(max(end.end, end.last_arrival)) + step.ending_seconds(),
        busy=tuple(float(rank.busy) + optimizer for rank in ranks),
        transfer=tuple(float(rank.transfer) for rank in ranks),
        microbatches=ran,
        node_bytes=step.node_bytes(ran),
    )


def _listed(values: NDArray[Any]) -> list[Any]:
    """An array as lists, its records as objects with attributes."""
    names, plain = values.dtype.names, values.tolist()
    return plain if names is None else [SimpleNamespace(**dict(zip(names, one, strict=True))) for one in plain]


def _records(fields: dict[str, type], length: int, **values: Any) -> NDArray[Any]:
    """Records of 0 but for `values`, each for one field: one for each record or one for all."""
    records = np.zeros(length, np.dtype(list(fields.items())))
    for name, value in values.items():
        records[name] = value
    return records.view(np.recarray)


def _state(step: Step) -> EventState:
    """The step before its first event."""
    cluster, uses, gangs = step.cluster, step.model.uses(), step.gangs
    ranks, groups = cluster.ranks, cluster.ranks // step.shards
    on_demand, resident = step.transport in ("on demand", "dynamic"), step.transport == "resident"
    skewed = on_demand and cluster.owner_skew > 1 and step.shards > 1
    work, gang_of, jobs, first_job = _jobs(step, [use.share for use in uses])
    calls = 0 if on_demand else (max(step.counts) + 1) * 2 * len(uses)
    in_flight = min(cluster.reductions_in_flight, calls)
    exchanges = [step.exchange_seconds(gang, use) for gang in gangs for use in uses]
    sizes = [step.shards] * groups + [len(gang.ranks) for gang in gangs]
    return EventState(
        step=_records(
            STEP,
            1,
            on_demand=on_demand,
            dynamic=step.transport == "dynamic",
            resident=resident,
            cached=step.cached,
            skewed=skewed,
            in_order=step.transport == "dynamic" or step.cached or skewed,
            reduces_last=step.reduces_last,
            shards=step.shards,
            node=cluster.node,
            calls=calls,
            reductions_in_flight=in_flight,
            claim_seconds=cluster.claim_seconds(),
            latency=cluster.latency(step.shards),
            unit_seconds=step.model.unit_seconds,
        ),
        ranks=_records(
            RANK,
            ranks,
            slow=cluster.slowness(),
            end_job=first_job[1:],
            place=first_job[:-1] - 1,
            stage=GATHER if resident else NEXT,
            asked=-1.0,
            awaits=-1,
            fetched=-1.0,
            fetch_call=-1,
        ),
        uses=_uses(step, uses),
        joints=_records(
            JOINT,
            groups * calls + len(exchanges),
            seconds=[0.0] * groups * calls + [-1.0 if seconds is None else seconds for seconds in exchanges],
            done=math.inf,
        ),
        work=work,
        gang=gang_of,
        jobs=jobs,
        reductions=np.zeros((ranks, in_flight + 1), np.int64),
        members=np.array([*range(ranks), *(rank for gang in gangs for rank in gang.ranks)]),
        first_member=np.array(list(accumulate(sizes, initial=0))),
        link_free=np.zeros(groups),
        owner_free=np.zeros((4, ranks)),
        cached_at=np.full((cluster.nodes, len(step.model.units)), -1.0),
        node_free=np.zeros(cluster.nodes),
    )


def _uses(step: Step, uses: list[Use]) -> NDArray[Any]:
    """The uses of units with what their transfers and collectives take."""
    cluster, shards = step.cluster, step.shards
    fetched, pushed = [use.fetch_bytes for use in uses], [use.push_bytes for use in uses]

    def moved(nbytes: float, push: bool) -> float:
        if not nbytes:
            return -1.0
        if step.transport in ("on demand", "dynamic"):
            return cluster.transfer_seconds(nbytes, shards)
        return cluster.gather_seconds(nbytes, shards, reduces=push)

    owned = [
        (*cluster.owner_seconds(fetch, shards), *cluster.owner_seconds(push, shards))
        for fetch, push in zip(fetched, pushed, strict=True)
    ]
    near_fetch, far_fetch, near_push, far_push = zip(*owned, strict=True)
    return _records(
        USE,
        len(uses),
        unit=[use.unit for use in uses],
        ahead=[bool(step.prefetch) and not use.first and step.transport != "resident" for use in uses],
        forward=[not use.backward for use in uses],
        pushes=[use.push_bytes > 0 for use in uses],
        fetch_seconds=[moved(nbytes, False) for nbytes in fetched],
        push_seconds=[moved(nbytes, True) for nbytes in pushed],
        memory_fetch_seconds=[cluster.memory_seconds(nbytes, shards) for nbytes in fetched],
        memory_push_seconds=[cluster.memory_seconds(nbytes, shards) for nbytes in pushed],
        read_seconds=[cluster.read_seconds(nbytes * cluster.changed) for nbytes in fetched],
        near_fetch_seconds=near_fetch,
        far_fetch_seconds=far_fetch,
        near_push_seconds=near_push,
        far_push_seconds=far_push,
    )


def _jobs(step: Step, shares: list[float]) -> tuple[NDArray[Any], ...]:
    """Compute and gang of every job, and all ranks' jobs: pieces, microbatches and then dummies.

    Jobs are numbered rank after rank, then gang after gang; the last is a dummy's.
    """
    seconds = step.jobs()
    count, noise = len(seconds), step.noise()
    pieces = [(rank, gang) for gang, one in enumerate(step.gangs) for rank in one.ranks]
    alone = np.concatenate([seconds, [second for gang in step.gangs for second in gang.seconds]])
    work = alone[:, None] * (np.array(shares) if noise is None else np.array(shares) * noise)
    work = np.vstack([work, np.zeros(len(shares))])
    gang_of = np.array([-1] * count + [gang for _, gang in pieces] + [-1])
    if step.transport == "dynamic":  # costliest first
        return work, gang_of, np.argsort(-seconds, kind="stable"), np.zeros(step.cluster.ranks + 1, np.int64)
    jobs: list[int] = []
    first_job, begin = [0], 0
    for rank, (mine, target) in enumerate(zip(step.seconds, step.counts, strict=True)):
        jobs += [count + i for i, (member, _) in enumerate(pieces) if member == rank]
        jobs += [*range(begin, begin + len(mine)), *[len(work) - 1] * (target - len(mine))]
        begin += len(mine)
        first_job.append(len(jobs))
    return work, gang_of, np.array(jobs, np.int64), np.array(first_job)
