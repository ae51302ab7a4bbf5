"""Where every phase of a minibatch is computed, under each way to balance.

Chose to keep the ways apart only by the plan: decoding, exchanging, padding and computing are the same code, so that a
difference between arms is a difference of plans. Every rank plans for itself from the same lengths and gets the same.

* `none`: every example stays with the rank that drew it.
* `llm-only`: whole examples are dealt by the length of their sequence, as a sampler that balances before it loads does
  (pre-balancing); encoders compute where their example is, and nothing moves between phases.
* `all-padded`, `all-unpadded`: every phase is balanced, but both encoders by the one algorithm that is for padded or
  for unpadded batches (the paper's "all pad" and "all rmpad", section 8.3).
* `full`: every phase by the algorithm that is for it: images unpadded, audio padded, the language model unpadded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from odc.balance import QuadraticCost
from odc.dispatch import BalancePolicy, Rearrangement, post_balance
from odc.multimodal.examples import MODALITIES, Modality
from odc.multimodal.minibatch import PHASES, Minibatch, Phase

Padding = Literal["none", "full", "attention"]
Balance = Literal["none", "llm-only", "all-padded", "all-unpadded", "full"]
BALANCES: Final[tuple[Balance, ...]] = get_args(Balance)
_PADDED: Final[Mapping[Balance, tuple[Modality, ...]]] = {
    "all-padded": ("image", "audio"),
    "all-unpadded": (),
    "full": ("audio",),
}


@dataclass(frozen=True)
class StepPlan:
    """Where everything goes in one step.

    Args:
        phases: from the rank that drew an item to the rank that computes its phase.
        features: from the rank that encoded an image or clip to the rank that computes its example's sequence.
        seconds: what planning took.
    """

    phases: Mapping[Phase, Rearrangement]
    features: Mapping[Modality, Rearrangement]
    seconds: float


def plan_step(
    minibatch: Minibatch, balance: Balance, costs: Mapping[Phase, QuadraticCost], per_node: int
) -> StepPlan:
    """The plan of one minibatch. Pure; the same on every rank.

    Args:
        minibatch: what every rank drew.
        balance: see the module.
        costs: FLOPs of an item of each phase by its length.
        per_node: ranks of a node; new mini-batches are placed so that little crosses nodes (algorithm 3).
    """
    began = time.perf_counter()
    lengths = {phase: minibatch.lengths(phase) for phase in PHASES}
    stay = {phase: Rearrangement.identity([len(mine) for mine in lengths[phase]]) for phase in PHASES}
    text = stay["text"] if balance == "none" else _balanced(lengths["text"], "none", costs["text"], per_node)
    follow = {modality: text.lift(minibatch.parts(modality)) for modality in MODALITIES}
    phases: dict[Phase, Rearrangement] = {"text": text}
    for modality in MODALITIES:
        if balance in ("none", "llm-only"):
            phases[modality] = follow[modality]
        else:
            padding: Padding = "full" if modality in _PADDED[balance] else "none"
            phases[modality] = _balanced(lengths[modality], padding, costs[modality], per_node)
    features = {modality: follow[modality].compose(phases[modality].inverse()) for modality in MODALITIES}
    return StepPlan(phases, features, time.perf_counter() - began)


def _balanced(lengths: Sequence[Sequence[int]], padding: Padding, cost: QuadraticCost, per_node: int) -> Rearrangement:
    return post_balance(lengths, BalancePolicy(padding, alpha=cost.a, beta=cost.b))
