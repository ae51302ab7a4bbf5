"""What a simulated step took, in the words of `odc.trace`'s breakdown: busy, waiting, bubble. All of it simulated."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class StepResult:
    """One simulated minibatch.

    Args:
        seconds: from the first rank's start to the end of the optimizer's update.
        busy: compute seconds by rank, the optimizer's included.
        transfer: seconds by rank in which it stood still while its own transfer or collective moved bytes.
        microbatches: by rank, dummies included.
    """

    seconds: float
    busy: tuple[float, ...]
    transfer: tuple[float, ...]
    microbatches: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """1 - mean over ranks of busy / step, 0 to 1: the definition of `odc.trace.breakdown`."""
        return 1.0 - fmean(self.busy) / self.seconds if self.seconds > 0 else 0.0

    @property
    def transfer_share(self) -> float:
        """Mean share of the step in which a rank stood still for transfers."""
        return fmean(self.transfer) / self.seconds if self.seconds > 0 else 0.0

    @property
    def wait_share(self) -> float:
        """Mean share of the step spent waiting for other ranks: what is neither busy nor transfer."""
        return max(0.0, self.bubble - self.transfer_share)
