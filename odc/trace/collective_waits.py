"""Waiting and transfer inside a collective, separated by the time at which each rank arrived.

An all-gather cannot move a byte before its last rank has arrived, yet the rank that calls it sees one long span. Such
spans are split afterwards, from all ranks' arrival times. This assumes that the k-th collective of a unit in an epoch
is the same call on every rank, and that it spans all ranks given (with subgroup meshes, call it once for each group).

On a device a collective runs in a lane of its own, where it arrives when its stream comes to it, and compute loses only
the time for which its stream stalls: of a stall, waiting is what lies between an arrival of this rank and the last one.

Time before the last arrival counts as waiting even if some transfer between early ranks could overlap it, so WAIT is an
upper bound. The bubble does not change: neither waiting nor transfer is busy time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from odc.trace.spans import COLLECTIVE, COLLECTIVE_LANES, FETCH, MAIN, PUSH, WAIT, Span

_Key = tuple[int, str, str, int]  # epoch, category, unit, k
_Arrival = tuple[int, int]  # the last one, and minus the rank, so that the lowest rank wins a tie

_CATEGORIES = {lane: category for category, lane in COLLECTIVE_LANES.items()}


class SplitWaits(NamedTuple):
    """Spans by rank with their collectives split, and the epochs left unsplit because counts differ between ranks."""

    spans_by_rank: dict[int, list[Span]]
    unsplit: tuple[int, ...]


class _Collective(NamedTuple):
    """One rank's part in a collective, and when the last rank arrived."""

    span: Span
    last: _Arrival


def split_waits(spans_by_rank: Mapping[int, Sequence[Span]]) -> SplitWaits:
    """Split each collective span into WAIT (from this rank's arrival to the last rank's) and the rest, which keeps its
    category. Collective spans are FETCH or PUSH with `peer == COLLECTIVE`, on the main lane or on the lane of their
    category in `COLLECTIVE_LANES`; the k-th of one category, unit and epoch is matched over all ranks by start time.
    The WAIT names the last rank to arrive as its peer (the lowest of several), carries no bytes, and is left out where
    it would be empty; the rest keeps the bytes.

    A stall is a WAIT with `peer == COLLECTIVE` and a lane's name as its `unit`. What of it lies inside a WAIT of that
    lane stays a WAIT, for that peer; the rest becomes a FETCH or PUSH, of the unit that is transferred then.
    """
    calls = {rank: _calls(spans) for rank, spans in spans_by_rank.items()}
    unsplit = _uneven_epochs([set(own.values()) for own in calls.values()])
    last: dict[_Key, _Arrival] = {}
    for rank, own in calls.items():
        for index, key in own.items():
            arrival = spans_by_rank[rank][index].start_ns, -rank
            last[key] = max(last.get(key, arrival), arrival)
    split: dict[int, list[Span]] = {}
    for rank, spans in spans_by_rank.items():
        own = {index: key for index, key in calls[rank].items() if key[0] not in unsplit}
        matched = {index: _Collective(spans[index], last[key]) for index, key in own.items()}
        lanes = {lane: _Lane(call for call in matched.values() if call.span.lane == lane) for lane in _CATEGORIES}
        split[rank] = []
        for index, span in enumerate(spans):
            if index in matched:
                split[rank] += _parts(*matched[index])
            elif _is_stall(span) and span.epoch not in unsplit:
                split[rank] += lanes[span.unit].split(span)
            else:
                split[rank].append(span)
    return SplitWaits(split, tuple(sorted(unsplit)))


def _calls(spans: Sequence[Span]) -> dict[int, _Key]:
    """One rank's collectives: position in `spans` -> the key that matches it to the other ranks' calls."""
    counts: dict[tuple[int, str, str], int] = {}
    calls: dict[int, _Key] = {}
    for index in sorted(range(len(spans)), key=lambda index: spans[index].start_ns):
        span = spans[index]
        if span.peer == COLLECTIVE and span.category in (FETCH, PUSH):
            if span.lane not in (MAIN, COLLECTIVE_LANES[span.category]):
                continue
            key = span.epoch, span.category, span.unit
            k = counts.get(key, 0)
            counts[key] = k + 1
            calls[index] = *key, k
    return calls


def _uneven_epochs(calls: Sequence[set[_Key]]) -> set[int]:
    """Epochs with a call that some rank has and another lacks."""
    if not calls:
        return set()
    anywhere, everywhere = calls[0].union(*calls[1:]), calls[0].intersection(*calls[1:])
    return {call[0] for call in anywhere - everywhere}


def _parts(span: Span, last: _Arrival) -> list[Span]:
    arrival = min(last[0], span.end_ns)
    if arrival <= span.start_ns:
        return [span]
    wait = span._replace(category=WAIT, end_ns=arrival, peer=-last[1], nbytes=0)
    return [wait, span._replace(start_ns=arrival)]


def _is_stall(span: Span) -> bool:
    return span.category == WAIT and span.peer == COLLECTIVE and span.lane == MAIN and span.unit in _CATEGORIES


class _Lane:
    """One rank's calls of a lane. They seldom overlap: a stream runs one after the other."""

    def __init__(self, calls: Iterable[_Collective]) -> None:
        self._calls = sorted(calls, key=lambda call: call.span.start_ns)
        self._starts = [call.span.start_ns for call in self._calls]
        self._longest = max((call.span.end_ns - call.span.start_ns for call in self._calls), default=0)

    def split(self, stall: Span) -> list[Span]:
        """A stall in pieces of one kind, in time."""
        begin, end = stall.start_ns, stall.end_ns
        near = self._calls[bisect_left(self._starts, begin - self._longest) : bisect_left(self._starts, end)]
        near = [call for call in near if call.span.end_ns > begin]
        edges = {at for call in near for at in (call.span.start_ns, call.last[0], call.span.end_ns) if begin < at < end}
        moments = [begin, *sorted(edges), end]
        pieces: list[Span] = []
        for first, after in pairwise(moments):
            piece = self._piece(stall, near, first)
            if pieces and piece == pieces[-1]._replace(start_ns=stall.start_ns, end_ns=stall.end_ns):
                pieces[-1] = pieces[-1]._replace(end_ns=after)
            else:
                pieces.append(piece._replace(start_ns=first, end_ns=after))
        return pieces

    @staticmethod
    def _piece(stall: Span, near: Sequence[_Collective], at: int) -> Span:
        """The stall as it is from moment `at` on, with the times of the whole."""
        running = [call for call in near if call.span.start_ns <= at < call.span.end_ns]
        awaited = [call.last for call in running if at < call.last[0]]
        if awaited:
            return stall._replace(peer=-max(awaited)[1])
        unit = running[-1].span.unit if running else ""
        return stall._replace(category=_CATEGORIES[stall.unit], unit=unit)
