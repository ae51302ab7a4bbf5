"""What a job measured: one record a step, one result a rank.

Chose plain dataclasses of numbers, because they travel from the ranks to the launching process and into JSON as they
are. Samples and tokens count real ones only, never a dummy's.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Args:
        step: number of the step, from 1.
        loss: mean over the labelled tokens of all ranks, before the update.
        norm: gradient norm before clipping.
        lr: learning rate of the update.
        samples, tokens, label_tokens: of the minibatch, over all ranks.
        counts: microbatches that each rank ran, dummies included.
        dummies: how many of these were dummies.
        step_s: seconds from the start of the step to the end of the update, on this rank.
        plan_bubble: bubble that the plan predicts for how often the arm's ranks meet, by its cost model.
        bound_bubble: bubble that every plan of these samples has at least, by the same model.
        bubble: measured over all ranks, see `odc.trace.breakdown`; None before it is known, or where
            a rank's recorder could not hold the whole step.
        retried: why a rank gave the minibatch up the first time; it was then run in smaller microbatches.
    """

    step: int
    loss: float
    norm: float
    lr: float
    samples: int
    tokens: int
    label_tokens: int
    counts: list[int]
    dummies: int
    step_s: float
    plan_bubble: float
    bound_bubble: float
    bubble: float | None = None
    retried: str | None = None


@dataclass(frozen=True)
class SkippedStep:
    """An optimizer step that did not happen: its minibatch was given up twice. Weights and moments are untouched.

    Args:
        step: number of the step, from 1.
        reason: which rank gave it up the second time, and why.
    """

    step: int
    reason: str


@dataclass(frozen=True)
class JobResult:
    """What one rank brings back.

    Args:
        rank: global rank.
        steps: this run's steps, without those before a resume.
        peak_bytes: largest resident size after the first step; shared pages are divided among ranks.
        held_bytes: resident between two microbatches of the first step in which this rank had two, when no activation
            is alive; None when there was no such step.
        baseline_bytes: resident before the model was built, to subtract from both.
        checkpoint: the last checkpoint's folder.
        skipped: steps that no rank could do.
    """

    rank: int
    steps: list[StepRecord]
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
