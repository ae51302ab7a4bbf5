"""Waiting and transfer inside a collective, told apart by when each rank arrived.

An all-gather cannot move a byte before its last rank has arrived, yet the rank that calls it sees one long span. Such
spans are split afterwards, from all ranks' arrival times. This assumes that the k-th collective of a unit in an epoch
is the same call on every rank, and that it spans all ranks given (with subgroup meshes, call it once for each group).

Time before the last arrival counts as waiting even if some transfer between early ranks could overlap it, so WAIT is an
upper bound. The bubble does not change: neither waiting nor transfer is busy time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from odc.trace.spans import COLLECTIVE, FETCH, MAIN, PUSH, WAIT, Span

_Call = tuple[int, str, str, int]  # epoch, category, unit, k


class SplitWaits(NamedTuple):
    """Spans by rank with their collectives split, and the epochs left unsplit because counts differ between ranks."""

    spans_by_rank: dict[int, list[Span]]
    unsplit: tuple[int, ...]


def split_waits(spans_by_rank: Mapping[int, Sequence[Span]]) -> SplitWaits:
    """Split each collective span into WAIT (from this rank's arrival to the last rank's) and the rest, which keeps its
    category. Collective spans are FETCH or PUSH on the main lane with `peer == COLLECTIVE`; the k-th of one category,
    unit and epoch is matched over all ranks by start time. The WAIT names the last rank to arrive as its peer (the
    lowest of several), carries no bytes, and is left out where it would be empty; the rest keeps the bytes.
    """
    calls = {rank: _calls(spans) for rank, spans in spans_by_rank.items()}
    unsplit = _uneven_epochs([set(own.values()) for own in calls.values()])
    last: dict[_Call, tuple[int, int]] = {}  # arrival, and minus the rank, so that the lowest rank wins a tie
    for rank, own in calls.items():
        for index, call in own.items():
            arrival = spans_by_rank[rank][index].start_ns, -rank
            last[call] = max(last.get(call, arrival), arrival)
    split: dict[int, list[Span]] = {}
    for rank, spans in spans_by_rank.items():
        split[rank] = []
        for index, span in enumerate(spans):
            match = calls[rank].get(index)
            if match is None or match[0] in unsplit:
                split[rank].append(span)
            else:
                split[rank].extend(_parts(span, *last[match]))
    return SplitWaits(split, tuple(sorted(unsplit)))


def _calls(spans: Sequence[Span]) -> dict[int, _Call]:
    """One rank's collectives: position in `spans` -> the key that matches it to the other ranks' calls."""
    counts: dict[tuple[int, str, str], int] = {}
    calls: dict[int, _Call] = {}
    for index in sorted(range(len(spans)), key=lambda index: spans[index].start_ns):
        span = spans[index]
        if span.peer == COLLECTIVE and span.lane == MAIN and span.category in (FETCH, PUSH):
            key = span.epoch, span.category, span.unit
            k = counts.get(key, 0)
            counts[key] = k + 1
            calls[index] = *key, k
    return calls


def _uneven_epochs(calls: Sequence[set[_Call]]) -> set[int]:
    """Epochs with a call that some rank has and another lacks."""
    if not calls:
        return set()
    anywhere, everywhere = calls[0].union(*calls[1:]), calls[0].intersection(*calls[1:])
    return {call[0] for call in anywhere - everywhere}


def _parts(span: Span, last_arrival: int, minus_late_rank: int) -> list[Span]:
    arrival = min(last_arrival, span.end_ns)
    if arrival <= span.start_ns:
        return [span]
    wait = span._replace(category=WAIT, end_ns=arrival, peer=-minus_late_rank, nbytes=0)
    return [wait, span._replace(start_ns=arrival)]
