"""What a job measured: one record a step, one result a rank. Samples and tokens never count dummies."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from odc.trace import Breakdown


@dataclass(frozen=True)
class StepRecord:
    """What every workload records of one step, numbered from 1; counts are over all ranks.

    `loss` is the mean over the labelled tokens before the update, `norm` the gradient's before clipping, `step_s` runs
    to the end of the update on this rank. `bubble` is over all ranks; None before it is known, or where a rank's
    recorder could not hold the whole step. `valid_loss` is that of the validation set after the update, where measured.
    """

    step: int
    loss: float
    norm: float
    samples: int
    tokens: int
    label_tokens: int
    step_s: float
    bubble: float | None = field(default=None, kw_only=True)
    valid_loss: float | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class SkippedStep:
    """An optimizer step, from 1, that did not happen: its minibatch was given up twice, at last for `reason`."""

    step: int
    reason: str


def totals(steps: Sequence[StepRecord], seconds: float) -> dict[str, float]:
    """What `steps` did together, per second of the `seconds` that they took."""
    samples, tokens = sum(step.samples for step in steps), sum(step.tokens for step in steps)
    return {"seconds": seconds, "samples_per_s": samples / seconds, "tokens_per_s": tokens / seconds}


R = TypeVar("R", bound=StepRecord)


@dataclass(frozen=True)
class JobResult(Generic[R]):
    """What one rank brings back; `steps` are this run's, without those before a resume.

    `peak_bytes` is the most held at once after the first step, `held_bytes` what was held between two microbatches of
    the first step with two (None without one), when no activation is alive, and `baseline_bytes` before the model was
    built. `host` numbers the rank's host, in the order of the ranks.
    """

    rank: int
    steps: list[R]
    peak_bytes: int
    held_bytes: int | None
    baseline_bytes: int
    checkpoint: str | None = None
    skipped: list[SkippedStep] = field(default_factory=list)
    host: int = 0

    def summary(self) -> str:
        """One line for the end of a job."""
        if not self.steps:
            done = "no step was left to do: --steps counts those before the checkpoint, too"
            return f"all {len(self.skipped)} steps were skipped" if self.skipped else done
        last = self.steps[-1]
        timed = self.steps[1:] or self.steps
        seconds = statistics.median(step.step_s for step in timed)
        speed = statistics.median(step.tokens / step.step_s for step in timed)
        saved = f"; checkpoint {self.checkpoint}" if self.checkpoint else ""
        lost = f"; {len(self.skipped)} steps skipped" if self.skipped else ""
        unseen = "" if last.valid_loss is None else f"; validation loss {last.valid_loss:.4f}"
        return (
            f"step {last.step}: loss {last.loss:.4f}{unseen}; {seconds:.2f} s a step, {speed:,.0f} tokens/s (medians)"
            f"{lost}{saved}"
        )


@dataclass(frozen=True)
class ArmRun:
    """One run of one arm in a comparison: its ranks' results and where their time went in the windows that count.

    `steal` is the share of the cores' time that the host of a virtual machine took; `parts` is `Workload.dissect`'s.
    """

    results: list[JobResult[Any]]
    measured: Breakdown
    steal: float | None = None
    parts: Any = None

    @property
    def losses(self) -> list[float]:
        """Of every step, warm-up included."""
        return [step.loss for step in self.results[0].steps]
