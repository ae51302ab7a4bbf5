"""Every interleaving of the protocol's model, its deaths, its lanes, and the faults that the explorer must find."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from support.explorer import Actor, Explorer, Judge, Program, Step, Violation
from support.lanes_model import SERVERS, Device, lanes
from support.protocol_model import Job, deaths, dying, explore, model, named

JOBS = {
    "2 ranks": Job(2),
    "3 ranks": Job(3),
    "uneven": Job(3, microbatches=(0, 1, 2)),
    "abandoned": Job(3, abandons=frozenset({(0, 1)})),
    "abandoned at last": Job(2, abandons=frozenset({(1, 2)})),
    "one thread": Job(3, threads=False),
    "evaluated": Job(3, evaluates=frozenset({1})),
    "replicas": Job(4, replicas=2),
    "2 hosts": Job(2, hosts=2),
    "3 hosts": Job(3, hosts=3),
    "2 hosts, abandoned": Job(2, hosts=2, abandons=frozenset({(0, 1)})),
}


@pytest.mark.parametrize("name", JOBS)
def test_no_interleaving_breaks_a_property(name: str) -> None:
    """No deadlock, no read before its release, no gradient lost or added twice."""
    program = model(JOBS[name])
    assert explore(program, named()) >= sum(map(len, program.values()))


@pytest.mark.parametrize("job", [Job(2), Job(2, hosts=2)], ids=["one host", "2 hosts"])
def test_a_death_at_any_store_is_named_by_all_that_need_the_rank(job: Job) -> None:
    for actor, number in deaths(job):
        explore(dying(job, actor, number), named(0))


@pytest.mark.thorough
def test_two_ranks_of_a_host_share_a_cache_and_its_sums() -> None:
    explore(model(Job(4, hosts=2, epochs=1)), named())


@pytest.mark.thorough
def test_with_three_ranks_a_death_at_any_word_of_the_main_thread_is_named() -> None:
    job = Job(3, units=1, epochs=1, threads=False)
    written = [step for step in model(job)[0, "main"] if step.do in ("store", "write")]
    for number, step in enumerate(written):
        if step.do == "store":
            explore(dying(job, (0, "main"), number), named(0))


# planted faults ------------------------------------------------------------------------------------------------------

Change = Callable[[list[Step]], list[Step]]


def match(verb: str, do: str, word: str) -> Callable[[Step], bool]:
    return lambda step: (step.verb, step.do, step.key[0]) == (verb, do, word)


def without(verb: str, do: str, word: str) -> Change:
    found = match(verb, do, word)
    return lambda steps: [step for step in steps if not found(step)]


def twice(verb: str, do: str, word: str) -> Change:
    found = match(verb, do, word)
    return lambda steps: [one for step in steps for one in ([step, step] if found(step) else [step])]


def earlier(verb: str, do: str, word: str, before: tuple[str, str, str]) -> Change:
    """Each such step before the first of a kind that precedes it, since the last such step."""
    found, place = match(verb, do, word), match(*before)

    def change(steps: list[Step]) -> list[Step]:
        done: list[Step] = []
        part: list[Step] = []
        for step in steps:
            if found(step) and any(map(place, part)):
                at = next(i for i, one in enumerate(part) if place(one))
                done, part = [*done, *part[:at], step, *part[at:]], []
            else:
                part.append(step)
        return done + part

    return change


def unlocked(steps: list[Step]) -> list[Step]:
    """Sums are loaded, and stored again."""
    found: list[Step] = []
    for number, step in enumerate(steps):
        if step.do == "add":
            mine = ("loaded", id(steps), number)
            found += [step._replace(do="load", other=mine), step._replace(do="put", other=mine)]
        else:
            found.append(step)
    return found


def one_outcome(steps: list[Step]) -> list[Step]:
    return [step._replace(key=("OUTCOME", step.key[1])) if step.key[0] == "OUTCOME" else step for step in steps]


class Fault(NamedTuple):
    job: Job
    change: Change


PLAIN, REPLICAS, HOSTS = Job(2), Job(4, replicas=2), Job(2, hosts=2)
EVALUATED = Job(2, evaluates=frozenset({1}))
FAULTS = {
    "begin does not wait for DONE": Fault(EVALUATED, without("begin", "wait", "DONE")),
    "begin does not wait for READ": Fault(REPLICAS, without("begin", "wait", "READ")),
    "begin over hosts does not wait for READ": Fault(HOSTS, without("begin", "wait", "READ")),
    "PUBLISHED before the shards": Fault(PLAIN, earlier("begin", "store", "PUBLISHED", ("begin", "write", "shard"))),
    "sums are not zeroed": Fault(PLAIN, without("begin", "write", "sum")),
    "fetch does not wait for PUBLISHED": Fault(PLAIN, without("fetch", "wait", "PUBLISHED")),
    "push does not wait for a slot": Fault(Job(2, microbatches=(2, 2)), without("push", "wait", "ACCUMULATED")),
    "SENT before the block": Fault(PLAIN, earlier("push", "store", "SENT", ("push", "write", "slot"))),
    "ACCUMULATED before the block is read": Fault(
        Job(2, microbatches=(2, 2)), earlier("serve", "store", "ACCUMULATED", ("serve", "read", "slot"))
    ),
    "ACCUMULATED before the addition": Fault(PLAIN, earlier("serve", "store", "ACCUMULATED", ("serve", "add", "sum"))),
    "a block is added twice": Fault(PLAIN, twice("serve", "add", "sum")),
    "a block is not added": Fault(PLAIN, without("serve", "add", "sum")),
    "additions without the lock": Fault(PLAIN, unlocked),
    "done does not flush the sender": Fault(PLAIN, without("done", "wait", "pushed")),
    "DONE before OUTCOME": Fault(PLAIN, earlier("done", "store", "DONE", ("done", "write", "OUTCOME"))),
    "DONE before the counts": Fault(PLAIN, earlier("done", "store", "DONE", ("done", "write", "counts"))),
    "one OUTCOME for all epochs": Fault(Job(2, microbatches=(0, 1)), one_outcome),
    "collect does not wait for DONE": Fault(PLAIN, without("collect", "wait", "DONE")),
    "collect does not wait for ACCUMULATED": Fault(PLAIN, without("collect", "equal", "ACCUMULATED")),
    "collect does not wait for COMPLETE": Fault(REPLICAS, without("collect", "wait", "COMPLETE")),
    "COMPLETE before ACCUMULATED = SENT": Fault(
        Job(4, replicas=2), earlier("collect", "store", "COMPLETE", ("collect", "equal", "ACCUMULATED"))
    ),
    "READ before the sums are read": Fault(REPLICAS, earlier("collect", "store", "READ", ("collect", "read", "sum"))),
    "DONE only after the others' DONE": Fault(PLAIN, earlier("collect", "wait", "DONE", ("done", "store", "DONE"))),
    "CACHED before the shard": Fault(
        Job(4, hosts=2, epochs=1, units=1), earlier("cache", "store", "CACHED", ("cache", "write", "cached"))
    ),
    "LAST before the last addition": Fault(HOSTS, earlier("push", "store", "LAST", ("push", "add", "sum for"))),
    "collect does not wait for the sums that are read": Fault(HOSTS, without("collect", "wait", "arrived")),
}


def test_a_death_that_no_daemon_notices_is_a_deadlock() -> None:
    program = dying(PLAIN, (0, "main"), 0)
    del program[1, "watch"]
    with pytest.raises(Violation, match="deadlock"):
        explore(program, named(0))


# the queue, and an arena ----------------------------------------------------------------------------------------------


def queue(microbatches: int = 2) -> Program:
    """Two ranks that claim from a queue whose home is rank 0, in two epochs; each claims until none can be left."""
    program: Program = {}
    for me in (0, 1):
        steps = program[me, "main"] = list[Step]()
        for epoch in (1, 2):
            if me == 0:
                steps.append(Step("offer", "write", ("CLAIMED",)))
            steps.append(Step("offer", "write", ("inputs", me), epoch))
            steps.append(Step("offer", "store", ("OFFERED", me), epoch))
            steps += [Step("claim", "wait", ("OFFERED", one), epoch) for one in (0, 1)]
            for turn in range(microbatches):
                mine = ("number", me, epoch, turn)
                steps.append(Step("claim", "ticket", ("CLAIMED",), other=mine))
                for number in range(microbatches):
                    steps.append(Step("claim", "read", ("inputs", number), epoch, guard=(mine, number)))
                    steps.append(Step("claim", "add", ("computed", number, epoch), 1, guard=(mine, number)))
            steps.append(Step("done", "store", ("DONE", me), epoch))
            steps += [Step("collect", "wait", ("DONE", one), epoch) for one in (0, 1)]
    return program


def each_once(read: Callable[[tuple[str | int, ...]], int], lost: object) -> None:
    if any(read(("computed", number, epoch)) != 1 for number in (0, 1) for epoch in (1, 2)):
        raise Violation("a microbatch is not computed once")


def claimed_in_two(steps: list[Step]) -> list[Step]:
    halves = [
        [one._replace(do="load"), one._replace(do="put", value=1)] if one.do == "ticket" else [one] for one in steps
    ]
    return [step for half in halves for step in half]


QUEUE_FAULTS: dict[str, Change] = {
    "claim does not wait for OFFERED": without("claim", "wait", "OFFERED"),
    "OFFERED before the inputs": earlier("offer", "store", "OFFERED", ("offer", "write", "inputs")),
    "OFFERED before CLAIMED is 0": earlier("offer", "store", "OFFERED", ("offer", "write", "CLAIMED")),
    "a claim in two steps": claimed_in_two,
    "offers do not wait for DONE": without("collect", "wait", "DONE"),
}


def arena(steps: int = 3) -> Program:
    """Rank 0 puts an entry a step into one channel, which ranks 1 and 2 get."""
    owner: list[Step] = []
    for step in range(1, steps + 1):
        owner += [Step("put", "wait", ("COPIED", reader), step - 1) for reader in (1, 2)]
        owner += [Step("put", "write", ("entry",), -step), Step("put", "write", ("entry",), step)]
        owner.append(Step("put", "store", ("STEP",), step))
    program: Program = {(0, "main"): owner}
    for reader in (1, 2):
        got = program[reader, "main"] = list[Step]()
        for step in range(1, steps + 1):
            got.append(Step("get", "wait", ("STEP",), step))
            got.append(Step("get", "read", ("entry",), step))
            got.append(Step("get", "store", ("COPIED", reader), step))
    return program


ARENA_FAULTS: dict[str, Change] = {
    "put does not wait for COPIED": without("put", "wait", "COPIED"),
    "get does not wait for STEP": without("get", "wait", "STEP"),
    "STEP before the bytes": earlier("put", "store", "STEP", ("put", "write", "entry")),
    "COPIED before the copy": earlier("get", "store", "COPIED", ("get", "read", "entry")),
}


def test_nothing_breaks_a_queue_or_an_arena() -> None:
    """Each microbatch of a queue is computed once; an entry of an arena is read whole."""
    explore(queue(), each_once)
    explore(arena(), named())


PLANTED: dict[str, tuple[Program, Change, Judge]] = {
    **{name: (model(fault.job), fault.change, named()) for name, fault in FAULTS.items()},
    **{f"queue: {name}": (queue(), change, each_once) for name, change in QUEUE_FAULTS.items()},
    **{f"arena: {name}": (arena(), change, named()) for name, change in ARENA_FAULTS.items()},
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str) -> None:
    program, change, judge = PLANTED[name]
    faulty = {actor: change(steps) for actor, steps in program.items()}
    assert faulty != program, "the fault changes nothing"
    with pytest.raises(Violation):
        explore(faulty, judge)


# the lanes of a device -----------------------------------------------------------------------------------------------


def held_up(device: Device, slow: int, unit: int) -> list[int]:
    """Ranks that do not come to DONE where `slow` never ends its computation of a unit, counted from 0."""
    program = lanes(device)
    search = Explorer(program, SERVERS, lambda read, lost: None)
    steps = program[slow, "compute"]
    at = [number for number, step in enumerate(steps) if step.key == ("computed", slow)][unit]
    read = search.run(random.Random(0), {(slow, "compute"): at})
    return [rank for group in device.groups for rank in group if rank != slow and not read(("DONE", rank))]


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_rank_waits_for_anothers_compute_where_the_sender_waits_on_the_host(ranks: int) -> None:
    device = Device((tuple(range(ranks)),), "host", units=4)
    assert [held_up(device, 0, unit) for unit in range(4)] == [[]] * 4


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_lane_that_follows_the_sender_is_found_to_hold_up_the_peers(ranks: int) -> None:
    """A peer would get two slots through, then wait for this rank's next unit."""
    device = Device((tuple(range(ranks)),), "follows", units=4)
    assert held_up(device, 0, 0) == list(range(1, ranks))


def stuck(device: Device, late: Sequence[Actor]) -> bool:
    """Whether some of 20 orders ends with ranks that wait for one another."""
    search = Explorer(lanes(device), SERVERS, lambda read, lost: None)
    ranks = [rank for group in device.groups for rank in group]
    ends = (search.run(random.Random(seed), late=late) for seed in range(20))
    return any(not all(read(("DONE", rank)) for rank in ranks) for read in ends)


def test_a_circle_of_lanes_and_collectives_is_found_where_a_lane_follows_the_sender() -> None:
    """Ranks 0 and 1, and 2 and 3, compute together (tensor parallel); 0 and 2, and 1 and 3, push to each other. Where a
    lane follows, rank 0 stands in a unit that rank 1 has not launched, as the sender of that waits for a slot of rank
    3, which stands likewise.
    """
    groups, pairs, late = ((0, 2), (1, 3)), ((0, 1), (2, 3)), [(0, "daemon 2"), (3, "daemon 1")]
    assert stuck(Device(groups, "follows", units=5, pairs=pairs), late)
    assert not stuck(Device(groups, "host", units=5, pairs=pairs), late)


@pytest.mark.parametrize("rule", ["follows", "host"])
def test_lanes_add_everything_once(rule: str) -> None:
    device = Device(((0, 1),), "host" if rule == "host" else "follows")

    def whole(read: Callable[[tuple[str | int, ...]], int], lost: object) -> None:
        if any(read(("sum", rank)) != 2 * device.units for rank in (0, 1)):
            raise Violation("a gradient is lost")

    Explorer(lanes(device), SERVERS, whole).search()
