"""The protocol of docs/protocol.md as steps for `support.explorer`: what every thread of every rank does.

`test_conformance.py` holds the steps on words against what real jobs store and wait for, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from support.explorer import Actor, Explorer, Judge, Key, Program, Step, Violation

SERVERS = ("daemon", "watch", "link", "reader")
_BASE = 16  # a sum is a number in this base: its digit for each source counts pushes


@dataclass(frozen=True)
class Job:
    """What is explored. `microbatches` are each rank's in every epoch, whose `replicas` each hold all shards; ranks of
    `hosts` are numbered host by host. `abandons` are (rank, epoch): it gives up after its last push but one.
    """

    ranks: int
    units: int = 2
    slots: int = 2
    epochs: int = 2
    microbatches: tuple[int, ...] = ()
    replicas: int = 1
    hosts: int = 1
    abandons: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    evaluates: frozenset[int] = frozenset()  # epochs in which no rank pushes, or meets the others
    threads: bool = True  # that fetch ahead and push behind; else the main thread does both

    @property
    def shards(self) -> int:
        return self.ranks // self.replicas

    def others(self, me: int) -> list[int]:
        """As `RankGrid.others`."""
        return [(me + step) % self.ranks for step in range(1, self.ranks)]

    def host(self, rank: int) -> int:
        return rank * self.hosts // self.ranks

    def owners(self, me: int) -> list[int]:
        """As `RankGrid.shard_group_from_next`."""
        start = me - me % self.shards
        return [start + (me - start + step) % self.shards for step in range(1, self.shards + 1)]

    def copies(self, me: int) -> list[int]:
        """This rank and those that own the same shard in other replicas."""
        return list(range(me % self.shards, self.ranks, self.shards))

    def partners(self, me: int) -> list[int]:
        """Ranks with this rank's index on other hosts."""
        each = self.ranks // self.hosts
        return [me % each + host * each for host in range(self.hosts) if host != self.host(me)]

    def column(self, me: int, other: int) -> int:
        """The rank on the host of `me` with the index of `other`."""
        each = self.ranks // self.hosts
        return self.host(me) * each + other % each

    def here(self, me: int) -> list[int]:
        return [rank for rank in range(self.ranks) if self.host(rank) == self.host(me)]

    def counts(self, rank: int) -> int:
        return (self.microbatches or (1,) * self.ranks)[rank]

    def pushed(self, rank: int, epoch: int) -> list[tuple[int, int]]:
        """(microbatch, unit) in the order in which a rank pushes them in an epoch."""
        if epoch in self.evaluates:
            return []
        found = [(k, unit) for k in range(self.counts(rank)) for unit in reversed(range(self.units))]
        return found[:-1] if (rank, epoch) in self.abandons else found

    def abandoned(self, epoch: int) -> bool:
        return any(one == epoch for _, one in self.abandons)

    def total(self, epoch: int, unit: int, sources: list[int]) -> int:
        """What a sum holds once the pushes of all `sources` are added."""
        return sum(_BASE**one * [u for _, u in self.pushed(one, epoch)].count(unit) for one in sources)


class RankModel:
    """The steps of one rank's threads."""

    def __init__(self, job: Job, me: int) -> None:
        self.job, self.me = job, me
        self.main: list[Step] = []
        self.sender: list[Step] = [] if job.threads else self.main
        self.fetcher: list[Step] = [] if job.threads else self.main
        self.fetches = self.pushes = 0  # handed to the threads so far
        self.sent = dict.fromkeys(job.owners(me), 0)
        for epoch in range(1, job.epochs + 1):
            self.begin(epoch)
            for microbatch in range(job.counts(me)):
                self.compute(epoch, microbatch)
            self.done(epoch)
            if epoch not in job.evaluates:
                self.collect(epoch)

    def board(self, word: str, rank: int) -> Key:
        """A word of a rank as this rank sees it: on its board, or in this host's mirror of that."""
        far = self.job.host(rank) != self.job.host(self.me)
        return (word, rank, "mirror", self.job.host(self.me)) if far else (word, rank)

    def far(self, rank: int) -> bool:
        return self.job.host(rank) != self.job.host(self.me)

    def begin(self, epoch: int) -> None:
        job, me, verb = self.job, self.me, "begin"
        readers = [one for one in job.copies(me) if one != me] if job.hosts == 1 else job.partners(me)
        if epoch > 1:
            self.main += [Step(verb, "wait", self.board("DONE", one), epoch - 1) for one in job.others(me)]
            self.main += [Step(verb, "wait", self.board("READ", one), epoch - 1) for one in readers]
        self.main.append(Step(verb, "store", ("PUBLISHING", me), epoch))
        for unit in range(job.units):
            self.main += _written(verb, ("shard", me, unit), epoch)
            self.main.append(Step(verb, "write", ("sum", me, unit)))
            if job.hosts > 1:
                self.main += [Step(verb, "write", ("sum for", one, unit, me)) for one in job.partners(me)]
        self.main.append(Step(verb, "store", ("PUBLISHED", me), epoch))

    def compute(self, epoch: int, microbatch: int) -> None:
        """One microbatch: the thread fetches a unit ahead, and the other pushes behind."""
        job, me = self.job, self.me
        for unit in range(job.units):
            self.fetches += 1
            self.hand(self.fetcher, "fetches", self.fetches)
            for owner in job.owners(me):
                self.fetcher.append(Step("fetch", "wait", self.board("PUBLISHED", owner), epoch))
            for owner in job.owners(me):
                self.fetcher += self.copied(epoch, owner, unit, microbatch)
            self.hand(self.main, "fetched", self.fetches, self.fetches - (unit < job.units - 1))
        left = [one for one in job.pushed(me, epoch) if one[0] == microbatch]
        for k, unit in left:
            self.pushes += 1
            self.hand(self.sender, "pushes", self.pushes)
            for owner in job.owners(me):
                self.sender += self.pushed(epoch, owner, unit)
            if job.hosts > 1 and (k, unit) == max(one for one in job.pushed(me, epoch) if one[1] == unit):
                self.sender.append(Step("push", "store", ("LAST", me, unit), epoch))
            if job.threads:
                self.sender.append(Step("push", "store", ("pushed", me), self.pushes))

    def hand(self, to: list[Step], what: str, number: int, least: int | None = None) -> None:
        """Between the main thread and another: `number` is handed on, and waited for, or what came before it is."""
        if self.job.threads:
            giver = self.fetcher if to is self.main else self.main
            giver.append(Step("hand", "store", (what, self.me), number))
            to.append(Step("hand", "wait", (what, self.me), number if least is None else least))

    def copied(self, epoch: int, owner: int, unit: int, microbatch: int) -> Iterator[Step]:
        """A shard of a unit, from its owner's memory; from another host once an epoch, into this host's cache."""
        if not self.far(owner):
            yield Step("fetch", "read", ("shard", owner, unit), epoch)
            return
        host = self.job.host(self.me)
        mine: Key = ("claimed", self.me, owner, unit, epoch, microbatch)
        yield Step("cache", "claim", ("CLAIM", host, owner, unit), epoch, mine)
        yield Step("cache", "read", ("shard", owner, unit), epoch, guard=(mine, epoch))
        for step in _written("cache", ("cached", host, owner, unit), epoch):
            yield step._replace(guard=(mine, epoch))
        yield Step("cache", "store", ("CACHED", host, owner, unit), epoch, guard=(mine, epoch))
        yield Step("cache", "store", mine)
        yield Step("fetch", "wait", ("CACHED", host, owner, unit), epoch)
        yield Step("fetch", "read", ("cached", host, owner, unit), epoch)

    def pushed(self, epoch: int, owner: int, unit: int) -> Iterator[Step]:
        """One unit's gradient, to one owner."""
        me, job = self.me, self.job
        near = job.column(me, owner)
        yield Step("push", "wait", ("PUBLISHED", near), epoch)
        if self.far(owner):
            yield Step("push", "add", ("sum for", owner, unit, near), _BASE**me)
        elif owner == me or job.hosts > 1:  # over hosts every rank adds, under the lock
            yield Step("push", "add", ("sum", owner, unit), _BASE**me)
        else:
            posted = self.sent[owner]
            self.sent[owner] += 1
            yield Step("push", "wait", ("ACCUMULATED", owner, me), posted + 1 - job.slots)
            yield from _written("push", ("slot", owner, me, posted % job.slots), posted + 1)
            yield Step("push", "store", ("SENT", owner, me), posted + 1)

    def done(self, epoch: int) -> None:
        job, me = self.job, self.me
        if job.threads:
            self.main.append(Step("done", "wait", ("pushed", me), self.pushes))
        if job.pushed(me, epoch):
            for one in range(job.ranks):
                self.main.append(Step("done", "wait", self.board("PUBLISHED", one), epoch))
                self.main.append(Step("done", "write", ("counts", one, me), epoch))
        if epoch in job.evaluates:
            self.main += [Step("done", "store", (word, me), epoch) for word in ("COMPLETE", "READ")]
        outcome = 2 * epoch + ((me, epoch) in job.abandons)
        self.main.append(Step("done", "write", ("OUTCOME", me, epoch % 2), outcome))
        self.main.append(Step("done", "store", ("DONE", me), epoch))

    def collect(self, epoch: int) -> None:
        job, me, verb = self.job, self.me, "collect"
        self.main += [Step(verb, "wait", self.board("DONE", one), epoch) for one in job.others(me)]
        if job.hosts == 1:
            for one in sorted(job.owners(me)):
                self.main.append(Step(verb, "equal", ("ACCUMULATED", me, one), other=("SENT", me, one)))
        for one in range(job.ranks):
            if job.pushed(one, epoch):
                self.main.append(Step(verb, "read", ("counts", me, one), epoch))
            outcome = 2 * epoch + ((one, epoch) in job.abandons)
            self.main.append(Step(verb, "read", ("OUTCOME", one, epoch % 2), outcome))
        self.main.append(Step(verb, "store", ("COMPLETE", me), epoch))
        copies = job.copies(me) if job.hosts == 1 else job.partners(me)
        if len(job.copies(me)) > 1 and job.hosts == 1:
            self.main += [Step(verb, "wait", ("COMPLETE", one), epoch) for one in copies]
        if not job.abandoned(epoch):
            for unit in range(job.units):
                self.gather(epoch, unit)
        self.main.append(Step(verb, "store", ("READ", me), epoch))

    def gather(self, epoch: int, unit: int) -> None:
        job, me, verb = self.job, self.me, "collect"
        if job.hosts == 1:
            for one in job.copies(me):
                self.main.append(Step(verb, "read", ("sum", one, unit), job.total(epoch, unit, job.owners(one))))
            return
        self.main.append(Step(verb, "read", ("sum", me, unit), job.total(epoch, unit, job.here(me))))
        for one in job.partners(me):
            if unit:  # of which this rank hears too late, or never
                self.main.append(Step(verb, "wait", self.board("COMPLETE", one), epoch))
                self.main.append(Step(verb, "read", ("sum for", me, unit, one), job.total(epoch, unit, job.here(one))))
            else:
                self.main.append(Step(verb, "wait", ("arrived", me, one), epoch))

    def daemon(self, source: int) -> list[Step]:
        """Adds what `source` has posted to this rank."""
        job, me, steps, block = self.job, self.me, list[Step](), 0
        for epoch in range(1, job.epochs + 1):
            for _, unit in job.pushed(source, epoch):
                block += 1
                steps.append(Step("serve", "wait", ("SENT", me, source), block))
                steps.append(Step("serve", "read", ("slot", me, source, (block - 1) % job.slots), block))
                steps.append(Step("serve", "add", ("sum", me, unit), _BASE**source))
                steps.append(Step("serve", "store", ("ACCUMULATED", me, source), block))
        return steps

    def reader(self, partner: int) -> list[Step]:
        """Reads a host's sums of the first unit as soon as they are SUMMED, while others still compute."""
        job, me, steps = self.job, self.me, list[Step]()
        for epoch in range(1, job.epochs + 1):
            if not job.abandoned(epoch):
                steps += [Step("sums", "wait", ("LAST", one, 0), epoch) for one in job.here(partner)]
                steps.append(Step("sums", "read", ("sum for", me, 0, partner), job.total(epoch, 0, job.here(partner))))
                steps.append(Step("sums", "store", ("arrived", me, partner), epoch))
        return steps

    def link(self, host: int) -> list[Step]:
        """Sends this rank's words to another host, in the order in which they are stored."""
        words = ("PUBLISHED", "DONE", "COMPLETE", "READ")
        sent = [step for step in self.main if step.do == "store" and step.key[0] in words]
        steps: list[Step] = []
        for step in sent:
            steps.append(Step("link", "wait", step.key, step.value))
            steps.append(Step("link", "store", (*step.key, "mirror", host), step.value))
        return steps

    def program(self) -> Program:
        job, me = self.job, self.me
        found: Program = {(me, "main"): self.main}
        if job.threads:
            found |= {(me, "sender"): self.sender, (me, "fetcher"): self.fetcher}
        if job.hosts == 1:
            found |= {(me, f"daemon {one}"): self.daemon(one) for one in job.owners(me) if one != me}
        for one in job.partners(me):
            found[me, f"link {one}"] = self.link(job.host(one))
            found[me, f"reader {one}"] = self.reader(one)
        return found


def _written(verb: str, key: Key, value: int) -> list[Step]:
    """A write that takes time: a read in its middle finds neither the old value nor the new one."""
    return [Step(verb, "write", key, -value), Step(verb, "write", key, value)]


def model(job: Job) -> Program:
    """Every actor of a job."""
    return {actor: steps for rank in range(job.ranks) for actor, steps in RankModel(job, rank).program().items()}


def dying(job: Job, actor: Actor, number: int) -> Program:
    """The same, but a rank dies before the `number`-th store of one of its actors; every other notices some time."""
    program, (rank, _) = model(job), actor
    steps = program[actor]
    at = [place for place, step in enumerate(steps) if step.do in ("store", "write")][number]
    program[actor] = [*steps[:at], Step("death", "die", ("DEAD", rank), 1), *steps[at:]]
    for one in job.others(rank):
        notice = Step("death", "wait", ("DEAD", rank), 1)
        program[one, "watch"] = [notice, Step("death", "store", ("ABORT", one), 1 + rank)]
    return program


def deaths(job: Job) -> list[tuple[Actor, int]]:
    """Every store of rank 0: the actor, and its number among that actor's stores."""
    return [
        (actor, number)
        for actor, steps in model(job).items()
        if actor[0] == 0
        for number in range(sum(step.do in ("store", "write") for step in steps))
    ]


def named(dead: int | None = None) -> Judge:
    """Whoever was lost knows that `dead` died. Where another has not come to its end, the search says so itself."""

    def judge(read: Callable[[Key], int], lost: set[Actor]) -> None:
        for rank, name in lost:
            if dead is None or read(("ABORT", rank)) != 1 + dead:
                raise Violation(f"{name} of rank {rank} was lost, and no death explains it")

    return judge


def explore(program: Program, judge: Judge) -> int:
    """Search; returns the states that were reached. Raises Violation."""
    search = Explorer(program, SERVERS, judge)
    search.search()
    return search.states
