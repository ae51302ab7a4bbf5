"""Who knows of whom: replays a run's records in their order, and finds accesses that conflict and that nothing orders.

Agents are threads of the host and streams of devices. A stream does its tasks in order, each after what the thread that
asked for it knew then; a mark carries what a stream knows to whoever waits for it, a word's value what its writer knew.
The judgement does not depend on when the streams did their work in this run: what nothing orders is found in any.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from support.ordered.clocks import Clock, Clocks
from support.ordered.log import Key, Kind, Logs, Mode
from support.ordered.spans import Access, Spans

_KEPT = 64  # values of a word that may still be loaded


class What(NamedTuple):
    """An access, for reports; numbers of names are those of the process."""

    process: int
    agent: int
    thread: int  # that asked for it
    name: int
    site: int
    mode: int


class Conflict(NamedTuple):
    """Bytes [start, end) of `memory`, accessed twice without an order."""

    earlier: What
    later: What
    memory: Hashable
    start: int
    end: int


class _Addresses:
    """Which physical memory lies at a process's addresses: (address, bytes, memory, offset in it)."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, Hashable, int]] = []

    def map(self, start: int, nbytes: int, memory: Hashable, offset: int) -> None:
        kept = [one for one in self._ranges if one[0] + one[1] <= start or one[0] >= start + nbytes]
        self._ranges = sorted([*kept, (start, nbytes, memory, offset)], key=lambda one: one[0])
        self._starts = [one[0] for one in self._ranges]

    def find(self, address: int) -> tuple[Hashable, int] | None:
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start, nbytes, memory, offset = self._ranges[at]
        return (memory, offset + address - start) if address < start + nbytes else None


class _Blocks:
    """What threads knew when they gave blocks of memory back: (start, end, clock) of each that is free."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._free: list[tuple[int, int, Clock]] = []

    def give_back(self, start: int, nbytes: int, clock: Clock) -> None:
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._free.insert(at, (start, start + nbytes, clock))

    def give_out(self, start: int, nbytes: int) -> list[Clock]:
        """The clocks of all that a new block holds some of."""
        at = max(0, bisect_right(self._starts, start) - 1)
        found, kept = [], []
        end = at
        while end < len(self._free) and self._free[end][0] < start + nbytes:
            first, last, clock = self._free[end]
            if last > start:
                found.append(clock)
            kept += [
                (low, high, clock)
                for low, high in ((first, min(last, start)), (max(first, start + nbytes), last))
                if low < high
            ]
            end += 1
        self._free[at:end] = kept
        self._starts[at:end] = [one[0] for one in kept]
        return found


@dataclass
class _Process:
    addresses: _Addresses = field(default_factory=_Addresses)
    blocks: _Blocks = field(default_factory=_Blocks)
    accesses: dict[int, list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))  # by task
    marks: dict[int, Clock] = field(default_factory=dict)
    sites: dict[int, int] = field(default_factory=dict)  # by thread
    agents: dict[tuple[str, int], int] = field(default_factory=dict)  # threads and streams
    names: dict[tuple[str, int], int] = field(default_factory=dict)  # of threads, streams and the process itself


class Judge:
    """`judge` may be called again and again while the run goes on.

    Attributes:
        accesses: how many were judged.
        regions: by memory: (start, end, process, number of its name).
    """

    def __init__(self) -> None:
        self.clocks, self.accesses = Clocks(), 0
        self.processes: dict[int, _Process] = defaultdict(_Process)
        self.regions: dict[Hashable, list[tuple[int, int, int, int]]] = defaultdict(list)
        self._memory: dict[Hashable, Spans] = defaultdict(Spans)
        self._words: dict[Hashable, dict[int, Clock | None]] = defaultdict(dict)
        self._orders: dict[Hashable, Clock] = {}  # what was released to objects, locks and messages
        self._private = 0
        self._begun: set[int] = set()
        self._found: list[Conflict] = []

    def judge(self, logs: Logs, *, all_of_it: bool = False) -> list[Conflict]:
        batch = logs.batch(all_of_it=all_of_it)
        for number, records, _ in batch:
            self._gather(self.processes[number], records)
        parts = [records[:count] for _, records, count in batch]
        times = np.concatenate([part["time"] for part in parts]) if parts else np.zeros(0)
        order = np.argsort(times, kind="stable").tolist()
        rows = [(number, *row) for (number, _, _), part in zip(batch, parts, strict=True) for row in part.tolist()]
        return self.replay([rows[at] for at in order], logs.ended)

    def replay(self, rows: list[tuple[int, ...]], ended: Mapping[int, int] = {}) -> list[Conflict]:
        """Judge (process, time, kind, thread, a, b, c, d) in this order, their tasks' accesses being gathered.

        `ended` has the time of the last record of each process that is gone. One that begins later follows it: whoever
        has another take its place has seen its end.
        """
        self._found = []
        for number, time, kind, thread, a, b, c, d in rows:
            if number not in self._begun:
                self._begun.add(number)
                self._begin(number, thread, [other for other, last in ended.items() if last < time])
            self._replay(number, self.processes[number], kind, thread, a, b, c, d)
        return self._found

    def _begin(self, number: int, thread: int, gone: list[int]) -> None:
        """A process begins with this thread, after others have ended."""
        begins = self._agent(self.processes[number], "thread", thread)
        for agent in [agent for other in gone for agent in self.processes[other].agents.values()]:
            self.clocks.learn(begins, self.clocks.snapshot(agent))

    def _gather(self, process: _Process, records: np.ndarray) -> None:
        """The accesses of tasks, which come after them; those of records that come again are found again."""
        fresh: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        found = records[(records["kind"] == Kind.ACCESS) & (records["a"] != 0)]
        for task, start, nbytes, mode in zip(*(found[key].tolist() for key in "abcd"), strict=True):
            fresh[task].append((start, nbytes, mode))
        process.accesses.update(fresh)

    def _agent(self, process: _Process, kind: str, number: int) -> int:
        agent = process.agents.get((kind, number))
        if agent is None:
            agent = process.agents[kind, number] = self.clocks.new()
        return agent

    def _replay(self, number: int, process: _Process, kind: int, thread: int, a: int, b: int, c: int, d: int) -> None:
        clocks = self.clocks
        host = self._agent(process, "thread", thread)
        if kind == Kind.TASK:
            stream = self._agent(process, "stream", a)
            clocks.follow(stream, host)
            what = What(number, stream, thread, c, process.sites.get(thread, 0), 0)
            for start, nbytes, mode in process.accesses.pop(b, ()):
                self._access(process, start, nbytes, mode, stream, what)
        elif kind == Kind.ACCESS and a == 0:
            what = What(number, host, thread, 0, process.sites.get(thread, 0), 0)
            self._access(process, b, c, d, host, what)
        elif kind == Kind.MARK:
            stream = self._agent(process, "stream", a)
            clocks.follow(stream, host)
            process.marks[b] = clocks.snapshot(stream)
        elif kind == Kind.WAIT:
            clocks.learn(self._agent(process, "stream", a), process.marks[b])
        elif kind == Kind.JOIN:
            clocks.learn(host, process.marks[a])
        elif kind == Kind.BLOCK:
            if not c:
                self._give_back(number, process, host, a, b)
            for clock in process.blocks.give_out(a, b) if c else ():
                clocks.learn(host, clock)
        elif kind == Kind.MAP:
            self._private += 1
            process.addresses.map(a, b, ("file", c) if c else ("private", self._private), d)
        elif kind in (Kind.RELEASE, Kind.ACQUIRE, Kind.PLAIN, Kind.ADD):
            self._order(number, process, kind, host, a, b, c)
            if d:
                process.sites[thread] = d
        else:
            self._name(number, process, kind, thread, a, b, c)

    def _give_back(self, number: int, process: _Process, host: int, start: int, nbytes: int) -> None:
        """The last reference to a block has gone, later than those of jobs that were over before."""
        clock = self.clocks.snapshot(host)
        if (dropped := self._orders.get((Key.OBJECT, 0, number))) is not None:
            np.maximum(clock[: len(dropped)], dropped, out=clock[: len(dropped)])
        process.blocks.give_back(start, nbytes, clock)

    def _name(self, number: int, process: _Process, kind: int, thread: int, a: int, b: int, c: int) -> None:
        if kind == Kind.SITE:
            process.sites[thread] = a
        elif kind == Kind.THREAD:
            process.names["thread", thread] = a
        elif kind == Kind.STREAM:
            process.names["stream", a] = b
        elif kind == Kind.PROCESS:
            process.names["process", 0] = a
        elif kind == Kind.REGION and (place := process.addresses.find(a)) is not None:
            memory, start = place
            self.regions[memory].append((start, start + b, number, c))

    def _order(self, number: int, process: _Process, kind: int, host: int, a: int, b: int, c: int) -> None:
        clocks = self.clocks
        if kind != Kind.ADD and c in (Key.OBJECT, Key.MESSAGE):
            key: Hashable = (c, a, number if c == Key.OBJECT else 0)
        else:
            key = process.addresses.find(a) or (number, a)
        if kind != Kind.ADD and c != Key.WORD:
            known = self._orders.get(key)
            if kind == Kind.ACQUIRE and known is not None:
                clocks.learn(host, known)
            elif kind == Kind.RELEASE:
                self._orders[key] = clocks.snapshot(host)
                if known is not None and (c == Key.MESSAGE or not a):  # several threads may send on a connection
                    np.maximum(self._orders[key][: len(known)], known, out=self._orders[key][: len(known)])
            return
        values = self._words[key]
        if kind == Kind.ACQUIRE:
            if (stored := values.get(b)) is not None:
                clocks.learn(host, stored)
            return
        if kind == Kind.ADD and (stored := values.get(c)) is not None:
            clocks.learn(host, stored)
        values.pop(b, None)  # the newest at the end
        values[b] = None if kind == Kind.PLAIN else clocks.snapshot(host)
        if len(values) > _KEPT:
            del values[next(iter(values))]

    def _access(self, process: _Process, start: int, nbytes: int, mode: int, agent: int, what: What) -> None:
        place = process.addresses.find(start)
        if place is None:
            return  # memory of the host that no device reaches
        memory, first = place
        self.accesses += 1
        clocks = self.clocks
        access = Access(agent, clocks.time(agent), what._replace(mode=mode))

        def known(other: Access) -> bool:
            return other.agent == agent or clocks.knows(agent, other.agent, other.time)

        for other, at, end in self._memory[memory].access(first, first + nbytes, mode, access, known):
            self._found.append(Conflict(other.what, access.what, memory, at, end))


__all__ = ["Conflict", "Judge", "Mode", "What"]
