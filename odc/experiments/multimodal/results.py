"""What a multimodal job measured: one record a step, one result a rank.

Chose plain dataclasses of numbers, because they travel from the ranks to the launching process and into JSON as they
are. What is counted per phase is the rank's own; what is counted per step is over all ranks.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from odc.experiments.multimodal.minibatch import Phase


@dataclass
class PhaseCount:
    """One phase of one step on one rank.

    Args:
        items: images, clips or examples that it computed; no dummies.
        real: their lengths added up.
        computed: positions that went through the model, padding and dummies among them.
        near: bytes that this rank sent to ranks of its own node for this phase: inputs, features and gradients.
        far: the same to ranks of other nodes.
    """

    items: int = 0
    real: int = 0
    computed: int = 0
    near: int = 0
    far: int = 0


@dataclass(frozen=True)
class MultimodalStep:
    """One optimizer step.

    Args:
        step: number of the step, from 1.
        loss: mean over the labelled tokens of all ranks, before the update.
        norm: gradient norm before clipping.
        samples, tokens, label_tokens: of the minibatch, over all ranks; tokens are the language model's positions.
        flops: useful FLOPs of the minibatch over all ranks, without padding (`odc.experiments.multimodal.flops`).
        step_s: seconds from the start of the step to the end of the update, on this rank.
        plan_s: seconds that planning took in the loader's thread.
        waited_s: seconds that this rank waited for its loader before the step.
        phases: this rank's counts.
    """

    step: int
    loss: float
    norm: float
    samples: int
    tokens: int
    label_tokens: int
    flops: float
    step_s: float
    plan_s: float
    waited_s: float
    phases: dict[Phase, PhaseCount]


@dataclass(frozen=True)
class MultimodalResult:
    """What one rank brings back.

    Args:
        rank: global rank.
        steps: all steps.
        peak_bytes: largest resident size after the first step; shared pages are divided among ranks.
        baseline_bytes: resident before the model was built, to subtract.
        exchange_bytes: most that buffers for exchanging examples took at once; on demand, the declared arena.
    """

    rank: int
    steps: list[MultimodalStep]
    peak_bytes: int
    baseline_bytes: int
    exchange_bytes: int

    def summary(self) -> str:
        """One line for the end of a job."""
        timed = self.steps[1:] or self.steps
        seconds = statistics.median(step.step_s for step in timed)
        speed = statistics.median(step.tokens / step.step_s for step in timed)
        return f"step {len(self.steps)}: loss {self.steps[-1].loss:.4f}; {seconds:.2f} s a step, {speed:,.0f} tokens/s"
