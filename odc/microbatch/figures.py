"""What the trace says of a rank's inputs: how much memory they took, how old they were, how long it waited for them.

Chose to read it all from spans that are there anyway over counters beside them: the figures are of exactly what a
Perfetto file of the same run shows. The price is that with the recorder off there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from odc.microbatch.lazy import AGE, HELD, INPUTS, PREPARE
from odc.trace import MAIN, Span


@dataclass(frozen=True)
class InputFigures:
    """Inputs of one rank, measured.

    Args:
        microbatches: used.
        peak_bytes: most bytes of prepared inputs at one time, from ready until the next one was asked for.
        most_held: most prepared microbatches at one time.
        mean_age_s, max_age_s: from when a sample was made (or pulled, see `LazyMicrobatches`) to its use.
        prepare_s: seconds spent pulling and preparing, on whichever thread.
        waited_s: seconds the training thread had no input.
    """

    microbatches: int
    peak_bytes: int
    most_held: int
    mean_age_s: float
    max_age_s: float
    prepare_s: float
    waited_s: float


def input_figures(spans: Sequence[Span]) -> InputFigures:
    """Figures of the microbatches that were used and released within `spans`, all of one rank."""
    ages = [_seconds(span) for span in spans if span.lane == AGE]
    held = [span for span in spans if span.lane == HELD]
    # At one moment an end comes before a start: what is given up makes room for what comes.
    steps = sorted([(s.start_ns, 1, s.nbytes) for s in held] + [(s.end_ns, -1, -s.nbytes) for s in held])
    count = nbytes = most = peak = 0
    for _, one, size in steps:
        count, nbytes = count + one, nbytes + size
        most, peak = max(most, count), max(peak, nbytes)
    return InputFigures(
        microbatches=len(ages),
        peak_bytes=peak,
        most_held=most,
        mean_age_s=fmean(ages) if ages else 0.0,
        max_age_s=max(ages, default=0.0),
        prepare_s=sum(_seconds(span) for span in spans if span.unit == PREPARE),
        waited_s=sum(_seconds(span) for span in spans if span.unit == INPUTS and span.lane == MAIN),
    )


def _seconds(span: Span) -> float:
    return (span.end_ns - span.start_ns) * 1e-9
