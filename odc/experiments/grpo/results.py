"""What a GRPO job measured: one record a step, one result a rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GrpoStep:
    """One rollout and its updates.

    Args:
        step: from 1.
        version: of the weights that generated, as `odc.handover` counts; None where they were sent.
        reward, response_tokens: means over samples; `longest` is the longest response.
        loss, kl, norm: means over the step's minibatches: the objective per response token, the KL estimate per token
            (0 without the term), and the gradient norm before clipping.
        counts: microbatches that each rank ran, dummies included, over the step.
        rollout_s: seconds that rank 0 waited for the samples.
        train_s: seconds of the updates, the slowest rank's.
    """

    step: int
    version: int | None
    reward: float
    response_tokens: float
    longest: int
    loss: float
    kl: float
    norm: float
    counts: list[int]
    rollout_s: float
    train_s: float


@dataclass(frozen=True)
class GrpoResult:
    """One rank's result; `steps` are the same on all."""

    rank: int
    objective: str
    steps: list[GrpoStep]

    def summary(self) -> str:
        """One line."""
        first, last = self.steps[0], self.steps[-1]
        return (
            f"step {last.step}: reward {first.reward:.3f} -> {last.reward:.3f}, response {last.response_tokens:.1f} "
            f"tokens, loss {last.loss:.4f}, kl {last.kl:.4f} ({self.objective}'s objective)"
        )
