"""Post-balancing: which instance computes which examples of one phase, from their lengths alone.

What its batches cost (OrchMLLM, equation 2) decides which of the paper's algorithms applies. Planning is a pure
function with the same result on every machine, so every instance plans for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from odc.dispatch.algorithms import padded, padded_attention, tolerant, unpadded
from odc.dispatch.rearrangement import Ints, Rearrangement
from odc.errors import PlanError

Padding = Literal["none", "full", "attention"]


@dataclass(frozen=True)
class BalancePolicy:
    """What a batch of a phase costs, and with it how the phase is balanced."""

    # "none": examples are packed; "full": every example is padded to the batch's longest; "attention": packed but for
    # attention, which pads (a convolutional encoder, appendix A)
    padding: Padding = "none"
    alpha: float = 1.0  # cost of a token, > 0
    beta: float = 0.0  # cost of a pair of tokens in attention, >= 0; 0 where it does not matter
    # balance sums of lengths, and within this many tokens of each other sums of squares (algorithm 4 as published);
    # None balances the cost itself. Only with padding "none" and beta > 0.
    tolerance: int | None = None
    longest: int | None = None  # the most tokens of one example; a longer one is refused

    def __post_init__(self) -> None:
        if self.padding not in ("none", "full", "attention"):
            raise PlanError(f"padding must be none, full or attention, not {self.padding!r}")
        if not (0 < self.alpha < float("inf") and 0 <= self.beta < float("inf")):
            raise PlanError(f"a token must cost alpha > 0 and a pair beta >= 0, not {self.alpha!r} and {self.beta!r}")
        if self.tolerance is not None and (self.tolerance < 1 or self.algorithm != 4):
            raise PlanError("a tolerance is a number of tokens >= 1, for packed examples with beta > 0")
        if self.longest is not None and self.longest < 1:
            raise PlanError(f"the longest example must have at least one token, not {self.longest!r}")

    @property
    def algorithm(self) -> int:
        """Of the paper: 1 and 4 for packed examples, 2 for padded ones, 5 where only attention pads and matters."""
        if self.padding == "full":
            return 2
        if not self.beta:
            return 1
        return 4 if self.padding == "none" else 5

    def cost(self, lengths: ArrayLike) -> float:
        """Predicted cost of one batch of examples of these lengths; 0 for none."""
        known = np.asarray(lengths, np.float64)
        if not len(known):
            return 0.0
        b, longest = len(known), float(known.max())
        linear = b * longest if self.padding == "full" else float(known.sum())
        pairs = float((known * known).sum()) if self.padding == "none" else b * longest * longest
        return self.alpha * linear + self.beta * pairs


def post_balance(lengths: Sequence[ArrayLike], policy: BalancePolicy) -> Rearrangement:
    """Rearrange the mini-batches of all instances so that the costliest new one costs little (section 5.1).

    `lengths` holds one list an instance, which may be empty. New mini-batches may be empty too. Raises as
    `check_lengths`.
    """
    counts, flat = check_lengths(lengths, policy.longest)
    return Rearrangement.to(counts, balance_flat(flat, len(counts), policy))


def balance_flat(lengths: Ints, instances: int, policy: BalancePolicy) -> Ints:
    """Destination instance of every example, int64 [n], for checked lengths [n]."""
    if instances == 1:
        return np.zeros(len(lengths), np.int64)
    if policy.algorithm == 1:
        return unpadded(lengths, instances)
    if policy.algorithm == 2:
        return padded(lengths if not policy.beta else _single(lengths, policy), instances)
    if policy.algorithm == 5:
        return padded_attention(lengths, instances, policy.alpha, policy.beta)
    if policy.tolerance is not None:
        return tolerant(lengths, instances, policy.tolerance)
    return unpadded(_single(lengths, policy), instances)


def _single(lengths: Ints, policy: BalancePolicy) -> NDArray[np.float64]:
    """[n] cost of each example alone."""
    return policy.alpha * lengths + policy.beta * (lengths * lengths)


def check_lengths(lengths: Sequence[ArrayLike], longest: int | None) -> tuple[Ints, Ints]:
    """Counts int64 [d] and flat lengths int64 [n] of one list an instance, checked.

    Raises PlanError, naming instance and example, for a length that is no whole number (NaN too), below 1 or over the
    cap `longest`, and for no instances.
    """
    if not len(lengths):
        raise PlanError("there are no instances to balance")
    arrays = [np.asarray(values) for values in lengths]
    for instance, values in enumerate(arrays):
        if values.ndim != 1 or (values.dtype.kind not in "iuf" and values.size):
            raise PlanError(
                f"instance {instance}: lengths must be one list of integers, got {values.dtype} {values.shape}"
            )
    counts = np.array([len(values) for values in arrays])
    filled = [values for values in arrays if len(values)]
    flat = np.concatenate(filled) if filled else np.empty(0, np.int64)
    good = (flat >= 1) & (flat <= (np.iinfo(np.int64).max if longest is None else longest))
    if flat.dtype.kind == "f":
        good &= np.isfinite(flat) & (flat == np.floor(flat))
    if not good.all():
        place = int(np.flatnonzero(~good)[0])
        instance = int(np.searchsorted(np.cumsum(counts), place, side="right"))
        value = flat[place].item()
        over = longest is not None and value > longest
        why = f", more than the cap of {longest}" if over else "; a length is a whole number >= 1"
        example = place - int(counts[:instance].sum())
        raise PlanError(f"instance {instance}: example {example} has length {value}{why}")
    return counts, flat.astype(np.int64, copy=False)
