"""The node sums: what the ranks of a node have pushed for an owner on another node leaves it once, added up.

    every rank adds (under the lock) to the sum in its column's heap          wait: all DONE | COMPLETE
    the owner: wait: its partners' COMPLETE | read | add, in the order of the nodes | READ

Where the nodes are hosts, sums leave during the last backward:

    after its last push of a unit: LAST
    the column's daemon: all ranks of the host LAST | round, if sums are rounded | SUMMED, with the count of pushes
    the owner: SUMMED | read on a thread of its own, while backward goes on
    the owner, when all are DONE: whatever was not read, or was pushed to after its SUMMED, is read once it is COMPLETE

So LAST that is stored too early costs a second read, and nothing else. docs/protocol.md explains why, docs/hosts.md
what it saves.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from odc.deadlines import DRAIN_FIRST_SLEEP_S, DRAIN_LONGEST_SLEEP_S, Backoff
from odc.protocol.heap_reader import HeapRead, HeapReader
from odc.protocol.protocol import MemberProtocol
from odc.protocol.reduction import Reduction, RoundedSum
from odc.protocol.units import UnitSpec
from odc.protocol.words import Word
from odc.worker import Job, Worker

Send = Callable[[int, dict[int, int]], None]


class HostSums:
    """The sums in this rank's heap, which its partners read: announces when they may. Where shards span hosts.

    `send(epoch, counts)` sends SUMMED to the partners: by unit, how often the ranks of this host have pushed it.
    """

    def __init__(self, protocol: MemberProtocol, send: Send | None) -> None:
        self._send = send
        self._protocol, self._layout = protocol, protocol.layout
        self._summed = np.array([unit.numel > 0 for unit in self._layout.units], bool)
        self._epoch, self._over = 0, 0  # of `_open`; the newest that the rank's main thread has completed
        self._open = self._summed.copy()  # units that were not announced in this epoch
        self._before = [0] * len(self._summed)  # by unit: pushes until the end of the last epoch
        self._rounded: dict[int, tuple[int, int]] = {}  # by unit: epoch, and pushes that were in it
        self._rounding = threading.Lock()
        # What is announced once a mark is reached: epoch, and pushes by unit. The daemon's.
        self._asked = deque[tuple[object, int, dict[int, int]]]()
        self._backoff = Backoff(DRAIN_FIRST_SLEEP_S, DRAIN_LONGEST_SLEEP_S)

    def announce(self) -> bool:
        """Announce to the partners every unit that all ranks of this host have pushed for the last time, once it is
        rounded; True if it is to be called again, for what a device still rounds. On the daemon's thread, which sleeps
        for a millisecond at most: what it cannot see yet is read when all is complete.
        """
        self._ask()
        while self._asked:
            mark, epoch, counts = self._asked[0]
            if mark is not None and not self._layout.heap.lanes.reached(mark):
                self._backoff.sleep()
                return True
            self._asked.popleft()
            self._backoff.restart()
            if self._over < epoch and self._send is not None:
                self._send(epoch, counts)
        return False

    def _ask(self) -> None:
        """Have what all ranks of this host have pushed for the last time rounded."""
        peers = [self._layout.local(member) for member in self._protocol.grid.local]
        if not all(peer.attached for peer in peers):
            return
        epoch = self._protocol.board.load(Word.PUBLISHED)
        if epoch != self._epoch:
            self._epoch, self._open = epoch, self._summed.copy()
        ready = functools.reduce(np.logical_and, (peer.last_epochs() == epoch for peer in peers), self._open)
        found = ((unit, self._protocol.summed(unit)) for unit in np.flatnonzero(ready).tolist())
        counts = {unit: count for unit, count in found if count is not None}
        with self._rounding:
            if self._over >= epoch:
                return
            announced = {unit: count for unit, count in counts.items() if count > self._before[unit]}
            if announced:
                self._open[list(announced)] = False
                self._asked.append((self._round(epoch, announced), epoch, announced))

    def complete(self, used: Sequence[bool]) -> None:
        """Round what was not rounded, or has grown since, of the units that are `used`. Before COMPLETE, when all ranks
        are DONE; on the rank's main thread.
        """
        with self._rounding:
            self._over = self._protocol.epoch
            self._before = pushes_of(self._protocol, self._protocol.grid.here)
            self._round(self._over, {unit: self._before[unit] for unit in itertools.compress(range(len(used)), used)})
        if self._layout.rounded is not None:
            lanes = self._layout.heap.lanes
            with lanes.lane("server"):
                lanes.settle()  # also what the daemon has asked for

    def _round(self, epoch: int, counts: dict[int, int]) -> object:
        """Ask for what was not rounded with so many pushes; returns a mark that is reached when all of it is."""
        new = {unit: (epoch, count) for unit, count in counts.items() if self._rounded.get(unit) != (epoch, count)}
        self._rounded |= new
        return self._layout.round_sums([self._layout.units[unit] for unit in new])


def pushes_of(protocol: MemberProtocol, host: int) -> list[int]:
    """By unit, how often all ranks of `host` have pushed it since the start. When they are DONE."""
    layout, grid = protocol.layout, protocol.grid
    total = np.zeros(layout.param_base[-1] + 1, np.int64)
    for member in grid.on(host):
        pushes = layout.remote(member).pushes if grid.is_remote(member) else layout.mine.pushes(member)
        total[1:] += pushes.numpy()
    counts: list[int] = np.diff(total.cumsum()[layout.param_base]).tolist()
    return counts


class NodeSums(Reduction):
    """Sums of nodes that the owners read when all are complete."""

    def __init__(self, protocol: MemberProtocol, heaps: HeapReader) -> None:
        super().__init__(protocol)
        self._heaps, steps_to = heaps, protocol.grid.steps_to
        found = sorted(enumerate(self._layout.contributors), key=lambda one: steps_to(one[1]))
        self._partners = {member: number for number, member in found}

    def gather(self, used: Sequence[bool]) -> None:
        units = list(itertools.compress(itertools.count(), used))
        self._fill((partner, unit) for partner in self._partners for unit in units)

    def _fill(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Read the sums of these partners and units."""
        self._heaps.read_all(self._reads_of(pairs))

    def _reads_of(self, pairs: Iterable[tuple[int, int]]) -> Iterator[HeapRead]:
        layout = self._layout
        name = "sums" if layout.rounded is None else "wire"
        by_partner: dict[int, list[int]] = {}
        for partner, unit in pairs:
            by_partner.setdefault(partner, []).append(unit)
        for partner, units in by_partner.items():
            into, region = layout.arrived(self._partners[partner]), f"{name}/{self._row_in(partner)}"
            for first, end in _runs(units):
                start, stop = layout.wire_at[first], layout.wire_at[end]
                if stop > start:
                    yield HeapRead(partner, region, start, into[start:stop], "its host's sums of gradients")

    def parts(self, unit: UnitSpec) -> Iterator[torch.Tensor | RoundedSum]:
        """As in `Reduction`; by node. Where sums are rounded this rank's comes first."""
        nodes, mine, rounding = self._layout.grid.nodes, self._layout.mine.accumulator(unit), self._layout.rounding
        if rounding is None:
            for node in range(nodes.host_count):
                yield mine if node == nodes.here else self._sum_of(nodes.partner(node), unit)
            return
        yield mine
        for node in range(nodes.host_count):
            if node != nodes.here:
                yield RoundedSum(rounding[unit.index], self._arrived(nodes.partner(node), unit))

    def _sum_of(self, partner: int, unit: UnitSpec) -> torch.Tensor:
        """1-D [unit.numel]: the sum of a partner's node for this rank; of another host's the one that has arrived."""
        if not self._layout.grid.is_remote(partner):
            return self._layout.sums_of(partner, self._row_in(partner), unit)
        return self._arrived(partner, unit)[: unit.accumulator_bytes].view(unit.accumulator_dtype)

    def _arrived(self, partner: int, unit: UnitSpec) -> torch.Tensor:
        """uint8: what has arrived of the sum of a partner's host."""
        start, end = self._layout.wire_at[unit.index : unit.index + 2]
        return self._layout.arrived(self._partners[partner])[start:end]

    def _row_in(self, partner: int) -> int:
        """This rank's node among those for which the heap of `partner` holds sums."""
        nodes = self._layout.grid.nodes
        return nodes.row(nodes.here, seen_from=nodes.host(partner))


class EarlySums(NodeSums):
    """Sums of hosts, each read as it is complete, on a thread while backward goes on, or at the end.

    Attributes:
        sums: those in this rank's heap.
    """

    def __init__(self, protocol: MemberProtocol, heaps: HeapReader, worker: Worker, send: Send | None) -> None:
        super().__init__(protocol, heaps)
        self._worker, self.sums = worker, HostSums(protocol, send)
        self._changing = threading.Lock()
        self._announced: dict[tuple[int, int], tuple[int, int]] = {}  # by partner and unit: epoch, pushes in it
        self._read: dict[tuple[int, int], tuple[int, int]] = {}  # the same, of what has been read
        self._waiting: list[tuple[int, int]] = []  # partners and units to be read
        self._over, self._closed = 0, False
        self._newest: Job[None] | None = None  # of this reader, on the worker

    def note_summed(self, partner: int, epoch: int, counts: dict[int, int]) -> None:
        """SUMMED of a partner has come. On the daemon's thread; does not wait.

        The partner has published the epoch, so this rank has READ the one before: `arrived` is not read any more.
        """
        with self._changing:
            if epoch <= self._over or self._closed:
                return
            for unit, count in counts.items():
                self._announced[partner, unit] = epoch, count
                self._waiting.append((partner, unit))
            self._newest = Job(self._read_waiting)
            self._worker.submit(self._newest)

    def _read_waiting(self) -> None:
        """On the worker's thread."""
        with self._changing:
            pairs, self._waiting = self._waiting, []
            known = {pair: self._announced[pair] for pair in pairs}
        if self._closed or not pairs:
            return
        with contextlib.suppress(Exception):  # the main thread reads it again when it comes to it, and raises
            with self._layout.heap.lanes.lane("sums"):
                self._fill(pairs)
            self._read |= known

    def complete(self, used: Sequence[bool]) -> None:
        self.sums.complete(used)
        self._protocol.complete(wait=False)

    def gather(self, used: Sequence[bool]) -> None:
        protocol, epoch = self._protocol, self._protocol.epoch
        units = [unit.index for unit in self._layout.units if used[unit.index] and unit.numel]
        wanted: dict[tuple[int, int], tuple[int, int]] = {}
        for partner in self._partners:
            counts = pushes_of(protocol, protocol.grid.host(partner))
            mine = {(partner, unit): (epoch, counts[unit]) for unit in units}
            protocol.await_sums(partner, functools.partial(_holds, self._announced, mine))
            wanted |= mine
        self.skip()
        self._fill(pair for pair, known in wanted.items() if self._read.get(pair) != known)

    def skip(self) -> None:
        """Return when no thread reads what was announced in this epoch, and none will."""
        with self._changing:
            self._over = self._protocol.epoch
        if self._newest is not None:
            self._protocol.await_reads(next(iter(self._partners)), "the sums of gradients", self._newest.over)

    def close(self) -> None:
        self._closed = True
        self._worker.close()


def _holds(announced: dict[tuple[int, int], tuple[int, int]], wanted: dict[tuple[int, int], tuple[int, int]]) -> bool:
    return all(announced.get(pair) == known for pair, known in wanted.items())


def _runs(units: Iterable[int]) -> list[tuple[int, int]]:
    """(first, end) of each run of units that follow each other: one read each."""
    found: list[tuple[int, int]] = []
    for unit in sorted(units):
        if found and found[-1][1] == unit:
            found[-1] = found[-1][0], unit + 1
        else:
            found.append((unit, unit + 1))
    return found
