"""Where the time of each phase went, from the spans of all ranks.

Every pass of a step is marked as a microbatch (`odc.experiments.multimodal.step.PASSES`), so that the recorder, the
breakdown and the picture of every other arm work unchanged: a piece of a rank's time belongs to the phase whose pass it
lies in. What lies between passes is the exchange, or the end of the minibatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from odc.experiments.multimodal.minibatch import PHASES, Phase
from odc.experiments.multimodal.step import PASSES
from odc.trace import COMPUTE, MICROBATCH, Span
from odc.trace.cover import cover, marked_epochs

_SECOND = 1e9


@dataclass(frozen=True)
class PhaseTime:
    """One phase of one step.

    Args:
        busy_s: by rank, seconds of compute in the phase's passes.
        spent_s: by rank, seconds from the begin to the end of those passes: busy, and waiting or moving parameters.
    """

    busy_s: dict[int, float]
    spent_s: dict[int, float]

    @property
    def bubble(self) -> float:
        """1 - mean over ranks of busy / the longest rank's time in the phase; 0 where no rank ran it.

        What is lost if ranks meet at the phase's end. Under FSDP2, where they meet in it, that is what was lost.
        """
        longest = max(self.spent_s.values())
        return 1.0 - fmean(self.busy_s.values()) / longest if longest else 0.0


def phase_times(spans_by_rank: Mapping[int, Sequence[Span]], epoch: int) -> dict[Phase, PhaseTime]:
    """Seconds in each phase of one step (`epoch`, from 1), from the spans of all ranks."""
    mine = {rank: [span for span in spans if span.epoch == epoch] for rank, spans in spans_by_rank.items()}
    times = {phase: PhaseTime(dict.fromkeys(mine, 0.0), dict.fromkeys(mine, 0.0)) for phase in PHASES}
    marked = marked_epochs(mine)
    for rank, spans in mine.items():
        for piece in cover(spans, marked):
            if piece.category == COMPUTE and piece.microbatch >= 0:
                times[PASSES[piece.microbatch]].busy_s[rank] += (piece.end_ns - piece.start_ns) / _SECOND
        for span in spans:
            if span.category == MICROBATCH:
                times[PASSES[span.microbatch]].spent_s[rank] += (span.end_ns - span.start_ns) / _SECOND
    return times
