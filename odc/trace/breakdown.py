"""Where the time of each step went, and the measured bubble, by one definition for every arm.

* A rank's own step of an epoch runs from the start of its WINDOW mark to the end of the window, or to the end of its
  OPTIMIZER span of that epoch where that is later (the optimizer may run inside the window or after it).
* The step of the epoch runs from the first rank's start to the last rank's end. Every rank's row adds up to exactly
  this time; what lies outside a rank's own step, or inside it under no span, is idle.
* busy = compute + optimizer; bubble = 1 - mean over ranks of busy / step. Fetch, push and wait are not busy, whether
  they wait or transfer, so an arm gains nothing by how its collectives are split.

Time between steps (reading data, logging, evaluation) belongs to no step; steps of ranks that drift apart may overlap.
Epochs that some rank lacks (it died, or its recorder dropped their spans for newer ones) are left out and listed, never
estimated. Figures are medians over epochs with min and max.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from odc.errors import TraceError
from odc.trace.cover import cover, marked_epochs
from odc.trace.spans import CATEGORIES, COMPUTE, IDLE, MAIN, OPTIMIZER, WINDOW, Span

_SECOND = 1e9


@dataclass(frozen=True)
class Stat:
    """Median, min and max of one figure over epochs."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Stat:
        ordered = sorted(values)
        return cls(float(median(ordered)), float(ordered[0]), float(ordered[-1]))

    def to_dict(self) -> dict[str, float]:
        return {"median": self.median, "min": self.min, "max": self.max}


@dataclass(frozen=True)
class EpochBreakdown:
    """One step. `nanoseconds[rank][category]` adds up to `end_ns - start_ns` for every rank, exactly."""

    epoch: int
    start_ns: int
    end_ns: int
    nanoseconds: Mapping[int, Mapping[str, int]]

    @property
    def step_s(self) -> float:
        """Seconds from the first rank's start to the last rank's end."""
        return (self.end_ns - self.start_ns) / _SECOND

    def busy(self, rank: int) -> float:
        """Share of the step in which the rank computed or ran its optimizer, 0 to 1."""
        row = self.nanoseconds[rank]
        return (row[COMPUTE] + row[OPTIMIZER]) / (self.end_ns - self.start_ns)

    @property
    def bubble(self) -> float:
        """1 - mean over ranks of busy / step, 0 to 1."""
        return 1.0 - fmean(self.busy(rank) for rank in self.nanoseconds)

    def mean_s(self, category: str) -> float:
        """Seconds of a category, mean over ranks."""
        return fmean(row[category] for row in self.nanoseconds.values()) / _SECOND


@dataclass(frozen=True)
class Breakdown:
    """All steps of a run. `left_out`: epochs that not every rank recorded; `skipped`: leading epochs not counted."""

    steps: tuple[EpochBreakdown, ...]
    ranks: tuple[int, ...]
    left_out: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()

    @property
    def step_s(self) -> Stat:
        return Stat.of(step.step_s for step in self.steps)

    @property
    def bubble(self) -> Stat:
        return Stat.of(step.bubble for step in self.steps)

    def busy(self, rank: int) -> Stat:
        """Share of the step in which a rank was busy, 0 to 1."""
        return Stat.of(step.busy(rank) for step in self.steps)


def breakdown(spans_by_rank: Mapping[int, Sequence[Span]], *, skip: int = 0) -> Breakdown:
    """Seconds by category for every rank and epoch, and the measured bubble.

    `spans_by_rank` holds all spans of every rank, by global rank, in the order they were recorded; `skip` leading
    epochs are left out (warm-up). Raises TraceError if no epoch is left that every rank recorded completely, or a
    span's category is unknown.
    """
    if skip < 0:
        raise ValueError(f"skip must be 0 epochs or more, not {skip!r}")
    bounds = {rank: own_steps(spans) for rank, spans in spans_by_rank.items()}
    seen = {epoch for own in bounds.values() for epoch in own}
    whole = sorted(epoch for epoch in seen if all(epoch in own for own in bounds.values()))
    if len(whole) <= skip:
        raise TraceError(
            f"{len(whole)} minibatches were recorded completely on all {len(bounds)} ranks, and {skip} are skipped: "
            "nothing is left to break down (is tracing on, and does one minibatch fit into the recorder?)"
        )
    marked = marked_epochs(spans_by_rank)
    pieces = {rank: cover(spans, marked) for rank, spans in spans_by_rank.items()}
    steps = tuple(_one_step(epoch, bounds, pieces) for epoch in whole[skip:])
    return Breakdown(steps, tuple(sorted(bounds)), tuple(sorted(seen.difference(whole))), tuple(whole[:skip]))


def own_steps(spans: Iterable[Span]) -> dict[int, tuple[int, int]]:
    """One rank's own step of each epoch, `epoch -> (start_ns, end_ns)`: its window, and its optimizer if later.

    Raises TraceError if an epoch has two windows that lie apart.
    """
    windows: dict[int, tuple[int, int]] = {}
    optimizers: dict[int, int] = {}
    for span in spans:
        if span.lane != MAIN or span.end_ns <= span.start_ns:
            continue
        if span.category == WINDOW:
            start, end = windows.get(span.epoch, (span.start_ns, span.end_ns))
            if span.end_ns < start or span.start_ns > end:
                raise TraceError(
                    f"epoch {span.epoch} was recorded twice: clear the recorder between two runs; around roots that "
                    "train in turns, open one `recorder().window(n)`"
                )
            windows[span.epoch] = min(start, span.start_ns), max(end, span.end_ns)
        elif span.category == OPTIMIZER:
            optimizers[span.epoch] = max(optimizers.get(span.epoch, span.end_ns), span.end_ns)
    return {epoch: (start, max(end, optimizers.get(epoch, end))) for epoch, (start, end) in windows.items()}


def _one_step(
    epoch: int, bounds: Mapping[int, Mapping[int, tuple[int, int]]], pieces: Mapping[int, Sequence[Span]]
) -> EpochBreakdown:
    start = min(own[epoch][0] for own in bounds.values())
    end = max(own[epoch][1] for own in bounds.values())
    rows = {rank: _row(pieces[rank], own[epoch], end - start) for rank, own in sorted(bounds.items())}
    return EpochBreakdown(epoch, start, end, rows)


def _row(pieces: Sequence[Span], own: tuple[int, int], step: int) -> dict[str, int]:
    """Nanoseconds by category of the pieces inside a rank's own step; idle is the rest of the whole step."""
    begin, end = own
    row = dict.fromkeys(CATEGORIES, 0)
    at = bisect_right(pieces, begin, key=lambda piece: piece.end_ns)
    while at < len(pieces) and pieces[at].start_ns < end:
        piece = pieces[at]
        row[piece.category] += min(piece.end_ns, end) - max(piece.start_ns, begin)
        at += 1
    row[IDLE] = 0
    row[IDLE] = step - sum(row.values())
    return row
