"""A trace file that Perfetto (https://ui.perfetto.dev) and chrome://tracing open: Chrome's JSON trace event format.

A span takes some 290 bytes; a path that ends in ".gz" is compressed, which Perfetto opens as it is. Each rank is a
process and each lane a thread (more where spans of a lane overlap without nesting). Besides the recorded spans and
marks the file holds the derived compute (`args.derived`). Times are microseconds after the first span;
`otherData.origin_ns` is that span's time on the host's monotonic clock.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from odc.trace.cover import cover, marked_epochs
from odc.trace.spans import COMPUTE, IDLE, MAIN, MICROBATCH, RECOVERIES, WAIT, WINDOW, Span

_FORMAT = "odc-trace-1"
_ROWS_A_RANK = 1000  # Perfetto wants thread numbers that are unique over all ranks


def write_trace(
    path: str | os.PathLike[str],
    spans_by_rank: Mapping[int, Sequence[Span]],
    hosts: Mapping[int, int] | None = None,
) -> None:
    """Write the spans of all ranks, by global rank, as Chrome `X` events; the folder of `path` must exist.

    `hosts` has the number of each rank's host; where there are several, ranks are shown by host and named after it.
    Each event has `cat` (its category) and `args` with rank, epoch, microbatch, unit, peer, bytes and lane.
    """
    origin = min((span.start_ns for spans in spans_by_rank.values() for span in spans), default=0)
    several = hosts if hosts is not None and len(set(hosts.values())) > 1 else {}
    order = sorted(spans_by_rank, key=lambda rank: (several.get(rank, 0), rank))
    other: dict[str, Any] = {"format": _FORMAT, "origin_ns": origin, "ranks": sorted(spans_by_rank)}
    other |= {"hosts": [several[rank] for rank in sorted(several)]} if several else {}
    marked = marked_epochs(spans_by_rank)
    encode = json.JSONEncoder(separators=(",", ":")).encode
    target = Path(path)
    opener: Any = gzip.open if target.suffix == ".gz" else open
    with opener(target, "wt", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n')
        separator = ""
        for place, rank in enumerate(order):
            name = f"host {several[rank]}, rank {rank}" if several else f"rank {rank}"
            for event in _rank_events(rank, name, place, spans_by_rank[rank], origin, marked):
                file.write(separator + encode(event))
                separator = ",\n"
        file.write("\n]}\n")


def _rank_events(
    rank: int, called: str, place: int, spans: Sequence[Span], origin: int, marked: frozenset[int]
) -> Iterator[dict[str, Any]]:
    process = rank + 1  # Perfetto keeps process and thread 0 for the idle task
    # A recorded COMPUTE span covers like any other, but is not derived.
    covering = (span._replace(category=IDLE) if span.category == COMPUTE else span for span in spans)
    derived = (piece for piece in cover(covering, marked) if piece.category == COMPUTE)
    both = [(span, False) for span in spans] + [(piece, True) for piece in derived]
    rows = _Rows(process)
    for span, is_derived in sorted(both, key=lambda item: _outer_first(item[0])):
        event = _event(rank, span, process, rows.place(span), origin)
        if is_derived:
            event["args"]["derived"] = True
        yield event
    yield _name("process_name", process, process * _ROWS_A_RANK, name=called)
    yield _name("process_sort_index", process, process * _ROWS_A_RANK, sort_index=place)
    for index, (thread, name) in enumerate(rows.names()):
        yield _name("thread_name", process, thread, name=name)
        yield _name("thread_sort_index", process, thread, sort_index=index)


class _Rows:
    """Thread numbers of one rank. Viewers need the spans of a thread to nest or lie apart, so a span that partly
    overlaps another one of its lane goes to a second row of that lane. Spans must come in `_outer_first` order.
    """

    def __init__(self, process: int) -> None:
        self._next = process * _ROWS_A_RANK
        self._lanes: dict[str, list[tuple[int, list[int]]]] = {}  # lane -> rows: thread, ends of its open spans

    def place(self, span: Span) -> int:
        rows = self._lanes.setdefault(span.lane, [])
        for thread, open_ends in rows:
            while open_ends and open_ends[-1] <= span.start_ns:
                open_ends.pop()
            if not open_ends or span.end_ns <= open_ends[-1]:
                open_ends.append(span.end_ns)
                return thread
        rows.append((self._next, [span.end_ns]))
        self._next += 1
        return rows[-1][0]

    def names(self) -> list[tuple[int, str]]:
        """Thread and name of every row, in the order to show them: the main lane first."""
        lanes = sorted(self._lanes, key=lambda lane: (lane != MAIN, lane))
        return [
            (thread, f"{lane} ({number})" if number > 1 else lane)
            for lane in lanes
            for number, (thread, _) in enumerate(self._lanes[lane], start=1)
        ]


def _outer_first(span: Span) -> tuple[int, int, int]:
    depth = {WINDOW: 0, MICROBATCH: 1}.get(span.category, 2)
    return span.start_ns, -span.end_ns, depth


def _name(kind: str, process: int, thread: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


def _event(rank: int, span: Span, process: int, thread: int, origin: int) -> dict[str, Any]:
    start, length = (span.start_ns - origin) / 1000, (span.end_ns - span.start_ns) / 1000
    event: dict[str, Any] = {"ph": "X", "name": _title(span), "cat": span.category, "ts": start, "dur": length}
    args: dict[str, Any] = {"rank": rank, "epoch": span.epoch, "microbatch": span.microbatch, "unit": span.unit}
    args |= {"peer": span.peer, "bytes": span.nbytes, "lane": span.lane}
    return event | {"pid": process, "tid": thread, "args": args}


def _title(span: Span) -> str:
    if span.category == WINDOW:
        return f"minibatch {span.epoch}"
    if span.category == MICROBATCH:
        return span.unit or f"microbatch {span.microbatch}"
    if span.category in RECOVERIES:
        return f"{span.category}: {span.unit}"
    if span.category == WAIT and span.peer >= 0:
        return f"wait for rank {span.peer}"
    return f"{span.category} {span.unit}".rstrip()
