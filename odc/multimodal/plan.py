"""Where every phase of a minibatch is computed, under each way to balance.

Chose to keep the ways apart only by the plan: decoding, exchanging, padding and computing are the same code, so that a
difference between arms is a difference of plans. Every rank plans for itself from the same lengths and gets the same.

* `none`: every phase of an example is computed by the rank that drew it.
* `llm-only`: pre-balancing. The examples are dealt to the ranks by the length of their sequences before anything is
  loaded; every phase of an example is then computed where it was dealt, and nothing moves.
* `all-padded`, `all-unpadded`: every phase is balanced, but both encoders by the one algorithm that is for padded or
  for unpadded batches (the paper's "all pad" and "all rmpad", section 8.3).
* `full`: every phase by the algorithm that is for it: images unpadded, audio padded, the language model unpadded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from odc import dispatch
from odc.balance import QuadraticCost
from odc.dispatch import TEXT, BalancePolicy, Records, StepPlan
from odc.multimodal.examples import MODALITIES, Example, Modality, Text
from odc.multimodal.minibatch import Minibatch, Phase
from odc.multimodal.model import Geometry

Balance = Literal["none", "llm-only", "all-padded", "all-unpadded", "full"]
BALANCES: Final[tuple[Balance, ...]] = get_args(Balance)
_PADDED: Final[Mapping[Balance, tuple[Modality, ...]]] = {
    "all-padded": ("image", "audio"),
    "all-unpadded": (),
    "full": ("audio",),
}
_FLOAT = 4  # bytes


@dataclass(frozen=True)
class Planner:
    """Plans minibatches; pure, the same on every rank.

    Args:
        balance: see the module.
        costs: FLOPs of an item of each phase by its length.
        geometry: of the model, for what a token of each phase weighs.
        per_node: ranks of a declared node; new mini-batches are placed so that little crosses nodes (algorithm 3).
    """

    balance: Balance
    costs: Mapping[Phase, QuadraticCost]
    geometry: Geometry
    per_node: int

    def plan(self, drawn: Minibatch) -> tuple[Minibatch, StepPlan, float]:
        """What each rank loads, the plan of it, and the seconds this took."""
        began = time.perf_counter()
        if self.balance == "llm-only":
            move = self._step(drawn, balanced_llm=True).llm
            drawn = Minibatch(move.apply(drawn.drawn))
        balanced = self.balance in _PADDED
        plan = self._step(drawn, balanced_llm=balanced, padded=_PADDED[self.balance] if balanced else None)
        return drawn, plan, time.perf_counter() - began

    def _step(self, drawn: Minibatch, *, balanced_llm: bool, padded: tuple[Modality, ...] | None = None) -> StepPlan:
        """Encoders balanced as packed, those named as padded; None leaves items where they were drawn."""
        g = self.geometry
        weights = {"image": 3 * g.patch * g.patch * _FLOAT, "audio": 2 * g.bins * _FLOAT}
        encoders = []
        for modality in MODALITIES:
            policy = None if padded is None else self._policy(modality, padded=modality in padded)
            encoders.append(dispatch.Phase(modality, policy, bytes_in=weights[modality], bytes_out=g.width * _FLOAT))
        llm = dispatch.Phase("llm", self._policy("llm", padded=False) if balanced_llm else None, bytes_in=2 * _FLOAT)
        return dispatch.plan_step([_records(mine) for mine in drawn.drawn], encoders, llm, per_node=self.per_node)

    def _policy(self, phase: Phase, *, padded: bool) -> BalancePolicy:
        cost = self.costs[phase]
        return BalancePolicy("full" if padded else "none", alpha=1.0, beta=cost.b / cost.a)


def _records(examples: Sequence[Example]) -> Records:
    """What one rank drew, as the planner reads it."""
    parts = [
        [
            (TEXT, part.length) if isinstance(part, Text) else (part.modality, part.encoded, part.length)
            for part in example.parts
        ]
        for example in examples
    ]
    return Records.of(parts, MODALITIES)
