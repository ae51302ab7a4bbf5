"""The learning rate of a step: linear warm-up, then a cosine down to a fraction of the peak.

Chose a pure function of the step over a scheduler object: there is nothing to save, and a resumed job cannot disagree
with the one it continues. The cost is that the rate must be written to the optimizer before every step.
"""

from __future__ import annotations

import math


def learning_rate(step: int, *, steps: int, peak: float, warmup: int, floor: float) -> float:
    """The rate of optimizer step `step`, counted from 0, of `steps`.

    Args:
        step: from 0 to steps - 1.
        steps: of the whole schedule.
        peak: the rate after warm-up.
        warmup: steps of the linear rise; step 0 already gets peak / warmup.
        floor: fraction of `peak` that the last step gets.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    after = steps - 1 - warmup
    done = (step - warmup) / after if after > 0 else 0.0
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
