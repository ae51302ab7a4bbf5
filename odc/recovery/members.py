"""Who takes part in a generation, what of which rank its processes hold, and to which step all can go back. Pure.

A **place** is a rank as the launcher counts, from 0. The processes that take part in a generation are its **members**;
their ranks there are their numbers in the order of their places. A **layout** is one way in which the state is divided
over ranks: it begins with the generation whose members differ from those before, and has that one's number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from odc.errors import OdcError


class NothingKeptError(OdcError):
    """No step is kept of every rank: both copies of a rank's state are gone. Restart from the last checkpoint."""


class Share(NamedTuple):
    """The part of a state that is one rank's, in one layout."""

    layout: int
    rank: int


class Agreed(NamedTuple):
    """What ranks go back to: the state after a step, as it was kept in a layout."""

    layout: int
    step: int


@dataclass(frozen=True)
class Held:
    """Slots of one rank in the process that holds them: its descriptors, and the steps that are whole."""

    fds: list[int]
    steps: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Presence:
    """What a process shows of itself in a generation: what it holds, its own share among it if it has any.

    `device` is the UUID of the CUDA device on which it trains, if it does.
    """

    pid: int
    host: str
    held: dict[Share, Held]
    device: str = ""

    def encode(self) -> str:
        held = [[*share, one.fds, one.steps] for share, one in self.held.items()]
        return json.dumps([self.pid, self.host, held, self.device])

    @classmethod
    def decode(cls, text: bytes) -> Presence:
        pid, host, held, device = json.loads(text)
        return cls(pid, host, {Share(layout, rank): Held(fds, steps) for layout, rank, fds, steps in held}, device)

    def refuse_second(self, own: Presence, place: int) -> None:
        """OdcError if another process shows this than the one that shows `own`, which had the place before."""
        if (self.pid, self.host) != (own.pid, own.host):
            where = "" if self.host == own.host else " of another host"
            raise OdcError(
                f"rank {place} has two processes: {self.pid}{where} has taken the place of {own.pid}, which lives. "
                "Start one process for each rank"
            )


class MemberList(NamedTuple):
    """The places that take part in a generation, rising, and the layout of what they train."""

    layout: int
    places: tuple[int, ...]

    def encode(self) -> str:
        return json.dumps(self)

    @classmethod
    def decode(cls, text: bytes) -> MemberList:
        layout, places = json.loads(text)
        return cls(layout, tuple(places))


def newest_common(presences: Iterable[Presence], worlds: Mapping[int, int], first: int | None) -> Agreed | None:
    """The newest step that is whole for every rank of a layout; None where the job begins, or begins again.

    That is step `first`, whose state a rank has by its program alone; None before any rank has kept it. `worlds` are
    the numbers of ranks by layout, of all that something is held of. A newer layout begins at what an older one has
    kept, and counts once it is whole.
    NothingKeptError if a rank has kept nothing, although another cannot go back to the beginning any more.
    """
    kept: dict[int, dict[int, set[int]]] = {
        layout: {rank: set() for rank in range(world)} for layout, world in worlds.items()
    }
    for presence in presences:
        for share, held in presence.held.items():
            kept[share.layout][share.rank].update(held.steps)
    for layout in sorted(kept, reverse=True):
        if common := set.intersection(*kept[layout].values()):
            return Agreed(layout, max(common))
    if all(steps <= {first} for ranks in kept.values() for steps in ranks.values()):
        return None
    raise NothingKeptError(
        f"no step is kept of every rank: {describe(kept[max(kept)])}; no process lives that held the others. Restart "
        "from the last checkpoint"
    )


def describe(kept: Mapping[int, set[int]]) -> str:
    """For messages: which steps of which rank."""
    each = (f"rank {rank} {' and '.join(map(str, sorted(steps))) or 'none'}" for rank, steps in sorted(kept.items()))
    return ", ".join(each)


def on_whole_hosts(hosts: Mapping[int, str]) -> tuple[int, ...]:
    """The places, rising, that can train together: hosts must have equally many, so those with the most are taken.

    `hosts` are by place, of those that are there.
    """
    there = list(hosts.values())
    most = max(there.count(host) for host in there)
    return tuple(place for place in sorted(hosts) if there.count(hosts[place]) == most)


def needed_ranks(rows: int, world: int, rank: int, before: int) -> Sequence[int]:
    """Which of `before` ranks had rows that are `rank`'s among `world`, where torch deals out `rows` rows of a tensor.

    Each rank has `ceil(rows / ranks)` of them, the last ones fewer or none.
    """
    begin, end = rows_of(rows, world, rank)
    return [one for one in range(before) if _overlap(rows_of(rows, before, one), (begin, end))]


def rows_of(rows: int, world: int, rank: int) -> tuple[int, int]:
    """The rows of a rank, from and to."""
    each = -(-rows // world)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])
