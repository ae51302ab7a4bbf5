"""What one instance sends and receives in one move: a rearrangement with rows, cut down to one rank's part.

Ranks with different plans would move garbage, so every exchange compares the `digest` of the whole move.

An example (or subsequence) is a run of rows of a field, [rows, features...]. In the send order rows go by destination
instance, then destination slot; in the receive order by source instance, then destination slot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from odc.dispatch.rearrangement import Ints, Rearrangement, ranges
from odc.errors import PlanError

Run = tuple[int, int, int]  # first row there, first row here, rows


@dataclass(frozen=True, eq=False)
class FieldRoute:
    """One field's part of a route."""

    sent: Ints  # int64 [d] rows for each destination, itself among them
    received: Ints  # int64 [d] rows from each source
    pack: Ints  # int64 [rows sent] local row at each place of the send order
    unpack: Ints  # int64 [rows received] place in the receive order of each local row

    def inverse(self) -> FieldRoute:
        """The way back, of gradients for example."""
        return FieldRoute(self.received, self.sent, np.argsort(self.unpack), np.argsort(self.pack))

    @cached_property
    def outgoing(self) -> list[list[Run]]:
        """[d] runs of rows for each destination: (place among what goes there, local row, rows)."""
        return _runs(self.pack, self.sent)

    @cached_property
    def incoming(self) -> list[list[Run]]:
        """[d] runs of rows from each source: (place among what comes from there, local row, rows)."""
        return _runs(np.argsort(self.unpack), self.received)


@dataclass(frozen=True, eq=False)
class Route:
    """One instance's part of a move."""

    me: int  # the instance
    fields: dict[str, FieldRoute]  # by name
    digest: bytes  # of the whole move, the same on every instance

    @classmethod
    def of(cls, move: Rearrangement, rows: Mapping[str, ArrayLike], me: int) -> Route:
        """The part of instance `me`, with int [n] rows of the example at each flat source place, by field.

        Raises PlanError for rows of another number, below 0, or no field.
        """
        if not rows:
            raise PlanError("a move needs at least one field")
        found = hashlib.sha256()
        for array in (move.counts, move.new_counts, move.order):
            found.update(np.int64(array.size).tobytes() + array.tobytes())
        fields = {}
        for name, values in rows.items():
            known = np.ascontiguousarray(values, np.int64)
            if len(known) != len(move.order) or (len(known) and known.min() < 0):
                raise PlanError(f"field {name!r} must list rows >= 0 for each of {len(move.order)} examples")
            found.update(name.encode() + known.tobytes())
            fields[name] = _field(move, known, me)
        return cls(me, fields, found.digest())

    @cached_property
    def inverse(self) -> Route:
        """The way back."""
        fields = {name: field.inverse() for name, field in self.fields.items()}
        return Route(self.me, fields, hashlib.sha256(b"back" + self.digest).digest())


def _field(move: Rearrangement, rows: Ints, me: int) -> FieldRoute:
    d = move.instances
    local = np.arange(move.starts[me], move.starts[me + 1])
    landing = np.empty(len(move.order), np.int64)
    landing[move.order] = np.arange(len(move.order))
    by_destination = local[np.argsort(landing[local])]
    brought = rows[local]
    first = np.cumsum(brought) - brought
    pack = ranges(first[by_destination - move.starts[me]], rows[by_destination])
    sent = np.bincount(move.owners[local], weights=brought, minlength=d).astype(np.int64)
    arriving = move.arriving(me)
    origin, got = move.sources[arriving], rows[arriving]
    by_source = np.argsort(origin, kind="stable")
    place = np.empty(len(arriving), np.int64)
    place[by_source] = np.cumsum(got[by_source]) - got[by_source]
    received = np.bincount(origin, weights=got, minlength=d).astype(np.int64)
    return FieldRoute(sent, received, pack, ranges(place, got))


def _runs(here: Ints, counts: Ints) -> list[list[Run]]:
    """By peer: rows `here`, listed peer after peer, as runs of neighbours."""
    starts = np.concatenate([[0], np.cumsum(counts)])
    breaks = np.zeros(len(here) + 1, bool)
    breaks[1:-1] = np.diff(here) != 1
    breaks[starts] = True
    cuts = np.flatnonzero(breaks)
    peers = np.searchsorted(starts, cuts[:-1], side="right") - 1
    runs: list[list[Run]] = [[] for _ in counts]
    for peer, begin, end in zip(peers.tolist(), cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        runs[peer].append((begin - int(starts[peer]), int(here[begin]), end - begin))
    return runs
