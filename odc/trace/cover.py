"""What a rank's training thread was doing at each moment: nested spans, cut into pieces that do not overlap.

* At each moment the innermost main-lane span counts: of those that cover it, the one that started last (then the one
  that ends first, then the one recorded first). So nesting never counts time twice.
* Compute is derived: time inside a MICROBATCH mark that no other main-lane span covers.
* Where no rank recorded a MICROBATCH mark in an epoch (a user's own loop), the WINDOW stands for it. All ranks are
  asked, because under unequal microbatch counts a rank without microbatches is idle, not computing.
* Everything else is idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from operator import attrgetter

from odc.errors import TraceError
from odc.trace.spans import CATEGORIES, COMPUTE, MAIN, MARKS, MICROBATCH, WINDOW, Span

_KNOWN = frozenset(CATEGORIES) | frozenset(MARKS)
_START = attrgetter("start_ns")


def marked_epochs(spans_by_rank: Mapping[int, Sequence[Span]]) -> frozenset[int]:
    """Epochs in which at least one rank recorded a MICROBATCH mark."""
    return frozenset(
        span.epoch
        for spans in spans_by_rank.values()
        for span in spans
        if span.category == MICROBATCH and span.lane == MAIN
    )


def cover(spans: Iterable[Span], marked: frozenset[int]) -> list[Span]:
    """Cut one rank's main-lane spans into pieces, ordered in time, of which no two overlap.

    `spans` are all spans of one rank, in the order they were recorded; `marked` is `marked_epochs` of all ranks. Pieces
    keep epoch, microbatch, unit and peer, and include derived compute but not idle time. Each carries the `nbytes` of
    its whole span, so never sum them over pieces. Raises TraceError for a main-lane span of unknown category.
    """
    layers = _layers(spans, marked)
    moments = sorted({moment for span in layers for moment in (span.start_ns, span.end_ns)})
    pieces: list[Span] = []
    active: list[tuple[bool, int, int, int, Span]] = []  # a heap, innermost first; ended spans are dropped late
    current: Span | None = None
    since = coming = 0
    for moment in moments:
        while coming < len(layers) and layers[coming].start_ns <= moment:
            span = layers[coming]
            heappush(active, (span.category in MARKS, -span.start_ns, span.end_ns, coming, span))
            coming += 1
        while active and active[0][2] <= moment:
            heappop(active)
        innermost = active[0][4] if active else None
        if innermost is not current:
            if current is not None:
                pieces.append(_piece(current, since, moment))
            current, since = innermost, moment
    return pieces


def _layers(spans: Iterable[Span], marked: frozenset[int]) -> list[Span]:
    """The spans that can count, by start; of the marks only those that stand for compute, which lies beneath all."""
    layers: list[Span] = []
    for span in spans:
        if span.lane != MAIN or span.end_ns <= span.start_ns:
            continue
        if span.category not in _KNOWN:
            raise TraceError(
                f"epoch {span.epoch}: main-lane span of category {span.category!r}, which is none of "
                f"{', '.join(CATEGORIES + MARKS)}; put spans of your own on another lane"
            )
        if span.category != WINDOW or span.epoch not in marked:
            layers.append(span)
    layers.sort(key=_START)  # stable: recording order decides between equals
    return layers


def _piece(span: Span, start: int, end: int) -> Span:
    category, lane, _, _, epoch, microbatch, unit, peer, nbytes = span
    return Span(COMPUTE if category in MARKS else category, lane, start, end, epoch, microbatch, unit, peer, nbytes)
