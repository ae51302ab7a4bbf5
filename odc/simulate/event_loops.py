"""The loops of `events`: one clock runs all ranks, each of which is at a stage of the use of a unit.

`odc.balance.compiled` runs them: on arrays where numba compiles them, else on lists. `proceed` reads like the training
loop.
"""

from __future__ import annotations

import heapq
import math
from typing import Any, NamedTuple

# Stages of a rank: what it does next.
NEXT, GATHER, FETCH, EXCHANGE, COMPUTE, PUSH, REDUCED, END = range(8)
FETCHES, PUSHES = 0, 1  # directions of transfers on demand
AT_ONCE = -1.0  # the rank goes on with its next stage at the same time


class EventState(NamedTuple):
    """A step and how far it is. The first four hold records, the others arrays; times and durations are seconds."""

    step: Any  # one record of STEP
    ranks: Any  # [rank]: of RANK
    uses: Any  # [use]: of USE
    joints: Any  # [joint transfer]: of JOINT. Collectives by group and number, then exchanges by gang and use
    work: Any  # [job][use]: compute on a rank of factor 1; the last job is a dummy's
    gang: Any  # [job]: the gang whose piece it is, or -1
    jobs: Any  # all ranks' jobs in order; under "dynamic" those of all ranks together
    reductions: Any  # [rank][number modulo their most]: the joint transfer that is the rank's reduction
    members: Any  # ranks of group after group, then of gang after gang
    first_member: Any  # [group or gang]
    link_free: Any  # [group]: when its last collective is over
    owner_free: Any  # [a use's last four durations][node, or all]: when that of the fullest owner is free
    cached_at: Any  # [node][unit]: when it is in the node's cache; below 0: not asked for yet
    node_free: Any  # [node]: when its link to other nodes is free


#: Fields of records and their types: a step, ...
STEP = {
    "on_demand": bool,
    "dynamic": bool,
    "resident": bool,
    "cached": bool,  # by the node cache
    "skewed": bool,  # transfers queue at owners
    "in_order": bool,  # ranks must act in the order of the clock, as they share queues
    "reduces_last": bool,  # only a rank's last job pushes
    "shards": int,
    "node": int,  # ranks in a node
    "calls": int,  # collectives of a group, at most
    "reductions_in_flight": int,
    "claim_seconds": float,
    "latency": float,
    "unit_seconds": float,
    "claimed": int,  # jobs taken under "dynamic"
    "end": float,  # of the last rank
    "last_arrival": float,  # of a gradient
}
#: ... a rank, ...
RANK = {
    "slow": float,  # factor on compute
    "end_job": int,  # where its jobs end
    "place": int,  # of its job in `EventState.jobs`
    "stage": int,
    "use": int,
    "asked": float,  # since when it waits, or -1
    "took": float,  # duration of what it waits for
    "awaits": int,  # the joint transfer that it waits for, or -1
    "fetched": float,  # when the next unit is there; below 0: not asked for yet
    "fetch_took": float,
    "fetch_call": int,  # the joint transfer that brings it, or -1
    "called": int,  # collectives
    "oldest": int,  # of its reductions that it has not waited for
    "newest": int,
    "fetch_free": float,  # when its link is free
    "push_free": float,
    "busy": float,
    "transfer": float,
    "ran": int,  # microbatches
}
#: ... a use of a unit, ...
USE = {
    "unit": int,
    "ahead": bool,  # may be fetched during the use before
    "forward": bool,
    "pushes": bool,  # has gradients
    "fetch_seconds": float,  # of a transfer or collective; below 0: there is none
    "push_seconds": float,
    "memory_fetch_seconds": float,  # from and to the memory of the node
    "memory_push_seconds": float,
    "read_seconds": float,  # the node reads it from other nodes
    "near_fetch_seconds": float,  # of the fullest owner's links into its node and to other nodes
    "far_fetch_seconds": float,
    "near_push_seconds": float,
    "far_push_seconds": float,
}
#: ... and a transfer that begins once all members have called it.
JOINT = {
    "seconds": float,  # below 0: there is none
    "arrived": int,  # members that have called
    "latest": float,  # the last call
    "done": float,  # when it is over, or inf
}


def run(s: EventState) -> None:
    """Go on with the earliest rank, the lowest of equally early ones, until all are at their end."""
    step = s.step[0]
    events = [(0.0, rank) for rank in range(len(s.ranks))]
    while events:
        now, rank = heapq.heappop(events)
        then = proceed(s, rank, now, events)
        while then < math.inf and not step.in_order:
            now = then
            then = proceed(s, rank, now, events)
        step.end = max(step.end, now)
        if then < math.inf:
            heapq.heappush(events, (then, rank))


def proceed(s: EventState, rank: int, now: float, events: list[tuple[float, int]]) -> float:
    """Let a rank act until it computes or waits. When to go on with it; inf if others decide or it has ended."""
    me = s.ranks[rank]
    if me.asked >= 0:
        me.transfer += min(now - me.asked, me.took)
        me.asked = -1.0
    then = AT_ONCE
    while then == AT_ONCE:
        if me.stage == NEXT:
            then = take_job(s, me, now)
        elif me.stage == GATHER:
            then = gather_resident(s, rank, now, events)
        elif me.stage == FETCH:
            then = fetch(s, rank, now, events)
        elif me.stage == EXCHANGE:
            then = exchange(s, me, now, events)
        elif me.stage == COMPUTE:
            then = compute(s, rank, now, events)
        elif me.stage == PUSH:
            then = push(s, rank, now, events)
        elif me.stage == REDUCED:
            next_use(s, me)
        else:
            then = math.inf
    return then


def take_job(s: EventState, me: Any, now: float) -> float:
    """The rank's next microbatch or piece, or its end."""
    step, then = s.step[0], AT_ONCE
    me.use = 0
    if step.dynamic:
        then = now + step.claim_seconds  # the last claim finds nothing left
        me.place, me.end_job = step.claimed, len(s.jobs)
        step.claimed = min(step.claimed + 1, len(s.jobs))
    else:
        me.place += 1
    if me.place == me.end_job:
        me.stage = END
        return then
    if s.gang[s.jobs[me.place]] < 0:
        me.ran += 1
    me.stage = COMPUTE if step.resident else FETCH
    return then


def gather_resident(s: EventState, rank: int, now: float, events: list[tuple[float, int]]) -> float:
    """Gather one unit after the other before the first microbatch."""
    me = s.ranks[rank]
    k = me.use
    if k == len(s.uses) or not s.uses[k].forward:
        me.stage = NEXT
        return AT_ONCE
    me.use += 1
    ask(s, rank, now, k, events)
    return await_unit(s, me, now)


def fetch(s: EventState, rank: int, now: float, events: list[tuple[float, int]]) -> float:
    """Wait for this use's unit, which may have been asked for during the use before."""
    me = s.ranks[rank]
    if me.fetched < 0:
        ask(s, rank, now, me.use, events)
    me.stage = EXCHANGE
    return await_unit(s, me, now)


def exchange(s: EventState, me: Any, now: float, events: list[tuple[float, int]]) -> float:
    """Wait for the other pieces of a split sample, and for keys and values."""
    me.stage = COMPUTE
    gang = s.gang[s.jobs[me.place]]
    if gang < 0:
        return AT_ONCE
    groups = len(s.link_free)
    number = groups * s.step[0].calls + gang * len(s.uses) + me.use
    if s.joints[number].seconds < 0:
        return AT_ONCE
    call(s, number, groups + gang, now, events)
    return wait(me, now, s.joints[number].done, s.joints[number].seconds, number)


def compute(s: EventState, rank: int, now: float, events: list[tuple[float, int]]) -> float:
    """Compute, and ask for the next unit meanwhile."""
    me = s.ranks[rank]
    k = me.use
    me.fetched = -1.0
    if k + 1 < len(s.uses) and s.uses[k + 1].ahead:
        ask(s, rank, now, k + 1, events)
    seconds = (s.work[s.jobs[me.place]][k] + s.step[0].unit_seconds) * me.slow
    me.busy += seconds
    me.stage = PUSH
    return float(now + seconds)


def push(s: EventState, rank: int, now: float, events: list[tuple[float, int]]) -> float:
    """Send this use's gradients, which on demand delay only the end of the step."""
    step, me = s.step[0], s.ranks[rank]
    k = me.use
    if not s.uses[k].pushes or (step.reduces_last and me.place + 1 < me.end_job):
        next_use(s, me)
        return AT_ONCE
    if step.on_demand:
        done, _ = send(s, PUSHES, rank, now, k)
        step.last_arrival = max(step.last_arrival, done)
        next_use(s, me)
        return AT_ONCE
    me.stage = REDUCED
    mine = s.reductions[rank]
    mine[me.newest % len(mine)] = collective(s, rank, now, s.uses[k].push_seconds, events)
    me.newest += 1
    if me.newest - me.oldest <= step.reductions_in_flight:
        return AT_ONCE
    oldest = mine[me.oldest % len(mine)]
    me.oldest += 1
    return wait(me, now, s.joints[oldest].done, s.joints[oldest].seconds, oldest)


def next_use(s: EventState, me: Any) -> None:
    """Go on to the next use of a unit, or to the next job after the last."""
    me.use += 1
    me.stage = COMPUTE if s.step[0].resident else FETCH
    if me.use == len(s.uses):
        me.stage = NEXT


def ask(s: EventState, rank: int, now: float, k: int, events: list[tuple[float, int]]) -> None:
    """Begin the fetch or gather of use k's unit."""
    me, use = s.ranks[rank], s.uses[k]
    me.fetch_call, me.fetched, me.fetch_took = -1, now, 0.0
    if use.fetch_seconds < 0:
        return
    if s.step[0].on_demand:
        me.fetched, me.fetch_took = send(s, FETCHES, rank, now, k)
    else:
        me.fetch_took = use.fetch_seconds
        me.fetch_call = collective(s, rank, now, use.fetch_seconds, events)


def await_unit(s: EventState, me: Any, now: float) -> float:
    """Wait for the unit that was asked for last."""
    done = me.fetched
    if me.fetch_call >= 0:
        done = s.joints[me.fetch_call].done
    return wait(me, now, done, me.fetch_took, me.fetch_call)


def wait(me: Any, now: float, done: float, took: float, number: int) -> float:
    """Wait for what is over at `done`; inf: once the other members of joint transfer `number` have called it."""
    me.asked, me.took, me.awaits = now, took, -1
    if done == math.inf:
        me.awaits = number
    return max(now, done)


def collective(s: EventState, rank: int, now: float, seconds: float, events: list[tuple[float, int]]) -> int:
    """The number of the joint transfer that is the rank's next collective."""
    me, group = s.ranks[rank], rank // s.step[0].shards
    number = group * s.step[0].calls + me.called
    me.called += 1
    s.joints[number].seconds = seconds
    call(s, number, group, now, events)
    return int(number)


def call(s: EventState, number: int, group: int, now: float, events: list[tuple[float, int]]) -> None:
    """A member calls a joint transfer; with the last one it begins, and those that wait for it go on at its end."""
    joint = s.joints[number]
    joint.arrived += 1
    joint.latest = max(joint.latest, now)
    first, end = s.first_member[group], s.first_member[group + 1]
    if joint.arrived < end - first:
        return
    if group < len(s.link_free):  # collectives of a group run one after the other
        joint.done = max(joint.latest, s.link_free[group]) + joint.seconds
        s.link_free[group] = joint.done
        s.step[0].last_arrival = max(s.step[0].last_arrival, joint.done)
    else:
        joint.done = joint.latest + joint.seconds
    for place in range(first, end):
        member = s.ranks[s.members[place]]
        if member.awaits == number:
            member.awaits = -1
            heapq.heappush(events, (max(member.asked, joint.done), s.members[place]))


def send(s: EventState, direction: int, rank: int, now: float, k: int) -> tuple[float, float]:
    """When one unit between a rank and its owners has arrived, and how long that takes.

    An owner's queue has no gaps for what a rank has asked for but cannot send yet: others go first there.
    """
    step, me, use = s.step[0], s.ranks[rank], s.uses[k]
    node = rank // step.node
    fetches = direction == FETCHES
    began = max(now, me.fetch_free if fetches else me.push_free)
    if step.cached and fetches:
        done = max(began, read(s, node, now, k)) + use.memory_fetch_seconds
    elif step.cached:
        done = began + use.memory_push_seconds
    else:
        done = began + (use.fetch_seconds if fetches else use.push_seconds)
    if fetches:
        me.fetch_free = done
    else:
        me.push_free = done
    if step.skewed and fetches:
        served = max(
            queue(s.owner_free[0], node, now, use.near_fetch_seconds),
            queue(s.owner_free[1], 0, now, use.far_fetch_seconds),
        )
        done = max(done, served + step.latency)
    elif step.skewed:
        served = max(
            queue(s.owner_free[2], node, now, use.near_push_seconds),
            queue(s.owner_free[3], 0, now, use.far_push_seconds),
        )
        done = max(done, served + step.latency)
    return done, done - began


def queue(free: Any, number: int, asked: float, seconds: float) -> float:
    """When a resource that serves in order of arrival is done with something that takes `seconds`."""
    free[number] = max(asked, free[number]) + seconds
    return float(free[number])


def read(s: EventState, node: int, now: float, k: int) -> float:
    """When the unit of use k is in a node's cache: the node reads it once, for its first rank that asks."""
    unit = s.uses[k].unit
    if s.cached_at[node][unit] < 0:
        s.cached_at[node][unit] = queue(s.node_free, node, now, s.uses[k].read_seconds)
    return float(s.cached_at[node][unit])
