"""What a job measured: one record a step, one result a rank.

Records hold plain numbers, so that they travel between processes and into JSON. Samples and tokens never count dummies.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from odc.trace import Breakdown


@dataclass(frozen=True)
class StepRecord:
    """What every workload records of one step.

    Args:
        step: number of the step, from 1.
        loss: mean over the labelled tokens of all ranks, before the update.
        norm: gradient norm before clipping.
        samples, tokens, label_tokens: of the step, over all ranks.
        step_s: seconds from the start of the step to the end of the update, on this rank.
        bubble: measured over all ranks, see `odc.trace.breakdown`; None before it is known, or where a rank's recorder
            could not hold the whole step.
    """

    step: int
    loss: float
    norm: float
    samples: int
    tokens: int
    label_tokens: int
    step_s: float
    bubble: float | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class SkippedStep:
    """An optimizer step that did not happen: its minibatch was given up twice. Weights and moments are untouched.

    Args:
        step: number of the step, from 1.
        reason: which rank gave it up the second time, and why.
    """

    step: int
    reason: str


R = TypeVar("R", bound=StepRecord)


@dataclass(frozen=True)
class JobResult(Generic[R]):
    """What one rank brings back.

    Args:
        rank: global rank.
        steps: this run's steps, without those before a resume.
        peak_bytes: most bytes held at once after the first step (`odc.experiments.device.peak_bytes`).
        held_bytes: held between two microbatches of the first step in which this rank had two, when no activation is
            alive; None if there was no such step.
        baseline_bytes: held before the model was built, to subtract from both.
        checkpoint: the last checkpoint's folder.
        skipped: steps that no rank could do.
    """

    rank: int
    steps: list[R]
    peak_bytes: int
    held_bytes: int | None
    baseline_bytes: int
    checkpoint: str | None = None
    skipped: list[SkippedStep] = field(default_factory=list)

    def summary(self) -> str:
        """One line for the end of a job."""
        if not self.steps:
            return f"all {len(self.skipped)} steps were skipped" if self.skipped else "no step was left to do"
        last = self.steps[-1]
        timed = self.steps[1:] or self.steps
        seconds = statistics.median(step.step_s for step in timed)
        speed = statistics.median(step.tokens / step.step_s for step in timed)
        saved = f"; checkpoint {self.checkpoint}" if self.checkpoint else ""
        lost = f"; {len(self.skipped)} steps skipped" if self.skipped else ""
        return (
            f"step {last.step}: loss {last.loss:.4f}; {seconds:.2f} s a step, {speed:,.0f} tokens/s (medians)"
            f"{lost}{saved}"
        )


@dataclass(frozen=True)
class ArmRun:
    """One run of one arm in a comparison.

    Args:
        results: of its ranks.
        measured: where their time went, in the windows that count.
        steal: share of the cores' time that the host of a virtual machine took while it ran.
        parts: what the workload found in the spans.
    """

    results: list[JobResult[Any]]
    measured: Breakdown
    steal: float | None = None
    parts: Any = None

    @property
    def losses(self) -> list[float]:
        """Of every step, warm-up included."""
        return [step.loss for step in self.results[0].steps]
