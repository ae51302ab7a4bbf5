"""Ranks in virtual time: odc's host code over lanes that are clocks. See `bench.virtual_step`.

Of each rank these threads run as they are: the sender (`Sender`, `Pusher`, `DeviceRoute`, the rings), the fetch thread
(`Fetcher`, `PublishedShards.fetch`) and the daemon's drains (`Service`, `DeviceDrain`), over real words; on several
hosts also what reads ahead (`NodeCache`), the sums that leave (`EarlySums`) and the `Links`. The training thread calls
them as the hooks of a sharded model do. Data is addresses without memory, and a mover asks for time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from bench.stand_in import CPU, untouched
from bench.virtual_hosts import VirtualEngine, VirtualLink, VirtualNics, Wires
from bench.virtual_time import VirtualLanes, VirtualTime
from odc import deadlines, worker
from odc.bench.alone import Members
from odc.fsdp.fetcher import Fetch, Fetcher
from odc.fsdp.sender import Sender
from odc.hosts import heaps, links
from odc.hosts.links import Links
from odc.memory import Words
from odc.protocol import Gradient, HeapLayout, Outcome, UnitSpec, layout
from odc.settings import Settings

TRAINS, SENDS, FETCHES, SERVES, WIRE = "trains", "odc-send", "odc-fetch", "odc-server", "wire"


@dataclass(frozen=True)
class Costs:
    """Of the device, in bytes/s, and of the host, in seconds."""

    engine: float = 380e9  # the copy engine, one way, from or to all peers together
    memory: float = 2.5e12  # HBM, reads and writes
    nic: float = 50e9  # of a rank's own NIC, one way
    wire: float = 10e-6  # seconds of a message between hosts, one way
    read: float = 60e-6  # host, of a read from another host, on whichever thread does it
    fetch: float = 80e-6  # of a unit, on the fetch thread
    push: float = 110e-6  # on the sender
    drain: float = 60e-6  # on the daemon, of what all peers have pushed of a unit
    publish: float = 500e-6  # all units
    torch: float = 100e-6  # FSDP2's hooks and a layer's launches, each use of a unit


class VirtualMover:
    """A `DeviceMover` that moves nothing: it spends the host's time and asks the lanes for the device's."""

    atomic, packs = True, False

    def __init__(self, time: VirtualTime, lanes: VirtualLanes, costs: Costs, host: Callable[[float], None]) -> None:
        self._time, self._lanes, self._costs, self._host = time, lanes, costs, host

    def prepare(self, *asked: object) -> None:
        return

    def publish(self, places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        self._host(self._costs.publish)
        self._lanes.ask(sum(one.nbytes for one in (*places, *shards)) / self._costs.memory)

    def zero(self, totals: Sequence[torch.Tensor]) -> None:
        self._lanes.ask(sum(total.nbytes for total in totals) / self._costs.memory)

    def gather(self, outs: Sequence[torch.Tensor], offsets: object, shards: int, sources: Sequence[object]) -> None:
        self._host(self._costs.fetch)
        shard = sum(out.nbytes for out in outs) / shards
        self._lanes.ask(shard * (len(sources) - 1) / self._costs.engine + 2 * shard / self._costs.memory)

    def stage(self, values: Sequence[torch.Tensor], numels: Sequence[int], offsets: object, slots: Any) -> None:
        self._host(self._costs.push)
        self._lanes.ask(sum(numels) * values[0].itemsize * len(slots) / self._costs.engine)

    def put(self, address: int, source: int, nbytes: int) -> None:
        """Of a unit that is larger than a slot, one block to one owner."""
        self._host(self._costs.push / 20)
        self._lanes.ask(nbytes / self._costs.engine)

    def add_part(self, values: Any, numels: Sequence[int], offsets: object, shard: int, total: torch.Tensor) -> None:
        self._lanes.ask(sum(numels) * (values[0].itemsize + 2 * total.itemsize) / self._costs.memory)

    def accumulate_all(self, values: Any, numels: Sequence[int], offsets: object, places: Sequence[object]) -> None:
        """Atomic adds into fp32 sums of this host's ranks, of which one is this rank's: over the links to the others,
        at the rate of copies.
        """
        self._host(self._costs.push)
        self._lanes.ask(4 * sum(numels) * len(places) / self._costs.engine)

    def addition(self, places: Sequence[torch.Tensor], values: Sequence[Sequence[torch.Tensor]]) -> SimpleNamespace:
        moved = sum(one.nbytes for each in values for one in each) + 2 * sum(place.nbytes for place in places)

        def run() -> None:
            self._host(self._costs.drain)
            self._lanes.ask(moved / self._costs.memory)

        return SimpleNamespace(run=run)


class _Param:
    """A parameter to a `Fetcher`; its unsharded values are at one address for ever."""

    shard_dim = 0

    def __init__(self, nbytes: int, dtype: torch.dtype) -> None:
        self._values = untouched(nbytes).view(dtype)

    def allocate(self, shards: int) -> torch.Tensor:
        return self._values

    def ready(self) -> None:
        return

    free = ready


@dataclass(frozen=True)
class Used:
    """The use of a unit in a microbatch: seconds of compute, whether it is fetched before and pushed after."""

    unit: int
    seconds: float
    fetched: bool
    pushed: bool


@dataclass
class Figures:
    """Seconds of one rank's step: what its device does and why it stands still, what its host waits for."""

    begin: float = 0.0  # until all peers have published: the first use of a unit may begin
    compute: float = 0.0
    fetch: float = 0.0  # the device is idle until a unit is there
    host: float = 0.0  # ... until the host asks for work: launches, and pushes that found no room
    posted: float = 0.0  # when all that it pushes is at its owners, from the beginning of the step
    end: float = 0.0  # from its last compute until its own pushes are posted
    waiting: float = 0.0  # ... until every rank is done
    sums: float = 0.0  # ... until what was pushed to it is added, and its gradients are scaled
    step: float = 0.0
    slots: float = 0.0  # for which its sender waits for slots at others
    waits: dict[str, float] = field(default_factory=dict)  # the longest one of its threads for each thing


class VirtualRanks:
    """All ranks of `hosts` over `units`. `jobs[rank]` are its microbatches, each a sequence of `Used`.

    Over hosts an epoch that fetches each unit once comes before the step: ranks learn in which order to read ahead.
    """

    def __init__(
        self,
        units: Sequence[UnitSpec],
        jobs: Sequence[Sequence[Sequence[Used]]],
        costs: Costs,
        make_lanes: Callable[[VirtualTime], VirtualLanes] = VirtualLanes,
        hosts: int = 1,
    ) -> None:
        self._units, self._jobs, self._costs, self._hosts, ranks = units, jobs, costs, hosts, len(jobs)
        self.time = time = VirtualTime()
        self.lanes = [make_lanes(time) for _ in range(ranks)]
        self._interpreter = [0.0] * ranks  # when each process's lock is free
        self.figures = [Figures() for _ in range(ranks)]
        self._ended = 0
        self._patches = ExitStack()
        try:
            self._build()
        except BaseException:
            self._patches.close()  # or the threads of whoever goes on would wait in virtual time
            raise

    def _build(self) -> None:
        time, units, ranks = self.time, self._units, len(self._jobs)
        threads, queues = time.primitives()
        clock = SimpleNamespace(sleep=time.sleep, monotonic=time.now)

        def wait_at_least(words: Words, i: int, value: int, timeout_s: float) -> None:
            time.poll(lambda: words.load(i) >= value, timeout_s)

        for place, name, made in (
            (deadlines, "time", clock),
            (links, "time", clock),
            (links, "HostLink", VirtualLink),
            (heaps, "threading", threads),
            (Words, "wait_at_least", wait_at_least),
            (worker, "threading", threads),
            (worker, "queue", queues),
            (layout, "mover_for", self._mover),
        ):
            self._patches.enter_context(patch.object(place, name, made))
        self._bells = [queues.SimpleQueue() for _ in range(ranks)]
        self.nics = VirtualNics(time, ranks, self._costs.nic, self._costs.wire)
        self._wires = Wires(time, queues.SimpleQueue, self._costs.wire, self._bells)
        numbers = tuple(rank * self._hosts // ranks for rank in range(ranks)) if self._hosts > 1 else ()
        self._members = Members(
            CPU,
            self.lanes.__getitem__,
            Settings(trace=False),
            ranks,
            units,
            untouched,
            self._notify,
            numbers,
            self._across if numbers else None,
        )
        self._connect()
        sizes = [[(ranks * param.nbytes, param.dtype) for param in unit.params] for unit in units]
        self._params = [[_Param(*size) for size in unit] for unit in sizes]
        self._gradients = [
            [Gradient(i, untouched(nbytes).view(dtype)) for i, (nbytes, dtype) in enumerate(unit)] for unit in sizes
        ]

    def _mover(self, settings: Settings, device: torch.device, own: int) -> VirtualMover:
        return VirtualMover(self.time, self.lanes[own], self._costs, functools.partial(self._host, own))

    def _across(self, layout: HeapLayout) -> tuple[Any, Links]:
        """What a member reads from other hosts with, and its links there."""
        me = layout.grid.me
        return VirtualEngine(self.nics, me, lambda: self._host(me, self._costs.read)), Links(layout, _lost)

    def _connect(self) -> None:
        """Link the hosts."""
        for end in self._members.endpoints:
            for partner in end.grid.partners:
                self._wires.connect(end.grid.me, partner, end.protocol.sink, end.summed())  # type: ignore[arg-type]

    def _notify(self, member: int) -> None:
        self._bells[member].put(None)

    def _host(self, rank: int, seconds: float) -> None:
        """Python of one rank: its threads take turns."""
        begin = max(self.time.now(), self._interpreter[rank])
        self._interpreter[rank] = begin + seconds
        self.time.sleep(begin + seconds - self.time.now())

    def run(self, limit_s: float = 300.0) -> list[Figures]:
        """Simulate one step; `limit_s` is of real time."""
        try:
            for rank in range(len(self._jobs)):
                self._name_waits(rank)
                self.time.start(rank, SERVES, functools.partial(self._serve, rank))
                self.time.start(rank, WIRE, functools.partial(self._wires.run, rank))
                self.time.start(rank, TRAINS, functools.partial(self._train, rank))
            self.time.run(lambda: self._ended == len(self._jobs), limit_s)
            for actor in self.time.actors:
                self.figures[actor.rank].waits |= actor.waits
            return self.figures
        finally:
            self._members.close()
            self._patches.close()

    def _name_waits(self, rank: int) -> None:
        """Have the waits of a rank's protocol noted, by whom they are for."""
        protocol, time = self._members.endpoints[rank].protocol, self.time
        credit, published = protocol.await_credit, protocol.await_published

        def await_credit(owner: int, free: Callable[[], int]) -> None:
            begin = time.now()
            with time.waiting(f"rank {rank}'s sender for rank {owner}'s slot"):
                credit(owner, free)
            self.figures[rank].slots += time.now() - begin

        def await_published(members: Sequence[int], lane: str = "main") -> None:
            with time.waiting(f"rank {rank} for its peers to publish"):
                published(members, lane)

        protocol.await_credit, protocol.await_published = await_credit, await_published  # type: ignore[method-assign]

    def _serve(self, rank: int) -> None:
        service, bell = self._members.services[rank], self._bells[rank]
        while True:
            read = bell.get()  # of a link, or None
            if read is not None:
                read()
            while service.drain():
                pass

    def _train(self, rank: int) -> None:
        time, lanes, end, mine = self.time, self.lanes[rank], self._members.endpoints[rank], self.figures[rank]
        fetcher, sender = Fetcher(end.shards, 1, lanes), Sender(end.pusher, overlap=True, lanes=lanes)
        if self._hosts > 1:
            self._learn(rank, fetcher)
        end.protocol.await_end_of_epoch()
        began = time.now()
        self._publish(rank)
        lanes.free["compute"] = time.now()
        mine.begin = time.now() - began
        for number, microbatch in enumerate(self._jobs[rank], start=1):
            self._microbatch(rank, microbatch, fetcher, sender, last=number == len(self._jobs[rank]))
        computed = lanes.free["compute"]
        sender.flush()
        end.done(Outcome.TRAINED)
        posted = max(time.now(), computed)
        with time.waiting(f"rank {rank} for the last rank to be done"):
            end.protocol.await_done(end.protocol.epoch)
        met = max(time.now(), computed)
        self._sum_up(rank)
        mine.posted, mine.end, mine.waiting = posted - began, posted - computed, met - posted
        mine.sums, mine.step = time.now() - met, time.now() - began
        self._ended += 1

    def _learn(self, rank: int, fetcher: Fetcher) -> None:
        """An evaluation before the step, with a microbatch of this rank's, or of another, if it has none."""
        end = self._members.endpoints[rank]
        self._publish(rank)
        for use in next(job[0] for job in (self._jobs[rank], *self._jobs) if job):
            if use.fetched and not use.pushed:
                fetcher.prepare(self._units[use.unit], self._params[use.unit], now=True).wait()  # type: ignore[arg-type]
        end.done(Outcome.EVALUATED)

    def _publish(self, rank: int) -> None:
        end = self._members.endpoints[rank]
        end.shards.publish(self._members.shards, [True] * len(self._units))
        end.protocol.await_published(end.grid.others())

    def _sum_up(self, rank: int) -> None:
        """What `odc.fsdp.collect` does once all ranks are done."""
        end, lanes, used = self._members.endpoints[rank], self.lanes[rank], [True] * len(self._units)
        end.protocol.await_accumulated()
        end.reduction.complete(used)
        end.reduction.gather(used)
        passes = 2 + len(end.layout.contributors)  # reads this rank's sums and those of other hosts, and writes
        lanes.ask(passes * sum(unit.accumulator_bytes for unit in self._units) / self._costs.memory)
        lanes.settle()
        end.protocol.read_all()

    def _microbatch(self, rank: int, uses: Sequence[Used], fetcher: Fetcher, sender: Sender, last: bool) -> None:
        lanes, mine = self.lanes[rank], self.figures[rank]
        ahead: Fetch | None = None
        for place, use in enumerate(uses):
            self._host(rank, self._costs.torch)
            fetch, ahead = ahead, None
            if use.fetched and fetch is None:
                fetch = fetcher.prepare(self._units[use.unit], self._params[use.unit], now=True)  # type: ignore[arg-type]
            before = lanes.free["compute"]
            if fetch is not None:
                fetch.wait()
            there = max(before, lanes.free["compute"])
            following = uses[place + 1] if place + 1 < len(uses) else None
            if following is not None and following.fetched and following.pushed == use.pushed:
                params = self._params[following.unit]
                ahead = fetcher.prepare(self._units[following.unit], params, now=False)  # type: ignore[arg-type]
                ahead.begin()
            over = lanes.ask(use.seconds)
            mine.compute += use.seconds
            mine.fetch += there - before
            mine.host += over - use.seconds - there
            if use.pushed:
                sender.send(self._units[use.unit], self._gradients[use.unit], last=last)


def _lost(loss: object) -> None:
    raise RuntimeError(f"no rank dies in virtual time: {loss}")
