"""Where every phase of a minibatch is computed, under each way to balance.

Decoding, padding and computing are the same code under every balance, so that a difference between two of them is a
difference of plans, or under `all-gather` of the exchange.

* `none`: every phase of an example is computed by the rank that drew it.
* `llm-only`: pre-balancing. The examples are dealt to the ranks by the length of their sequences before anything is
  loaded; every phase of an example is then computed where it was dealt, and nothing moves.
* `all-pad`, `all-rmpad`: every phase is balanced, but both encoders by the one algorithm that is for padded or for
  unpadded batches (the paper's ablation of algorithms, section 8.3). What is computed stays as it is: images are
  packed and audio is padded.
* `full`: every phase by the algorithm that is for it: images unpadded, audio padded, the language model unpadded.
* `all-gather`: the plan of `full`; every rank gathers the rows of all ranks and keeps its own (the paper's ablation of
  the communicator), where the other balances send each row to the one rank that needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from odc import dispatch
from odc.balance import QuadraticCost
from odc.dispatch import TEXT, BalancePolicy, Records
from odc.experiments.multimodal.examples import MODALITIES, Example, Modality, Text
from odc.experiments.multimodal.minibatch import Minibatch, Phase
from odc.experiments.multimodal.model import Geometry

Balance = Literal["none", "llm-only", "all-pad", "all-rmpad", "all-gather", "full"]
BALANCES: Final[tuple[Balance, ...]] = get_args(Balance)
#: Where phases are balanced after drawing: the encoders that are balanced as padded.
_PADDED: Final[Mapping[Balance, tuple[Modality, ...]]] = {
    "all-pad": ("image", "audio"),
    "all-rmpad": (),
    "all-gather": ("audio",),
    "full": ("audio",),
}
_FLOAT = 4  # bytes


@dataclass(frozen=True)
class Planning:
    """How minibatches are planned; the same on every rank.

    Args:
        balance: see the module.
        costs: FLOPs of an item of each phase by its length.
        geometry: of the model, for what a token of each phase weighs.
    """

    balance: Balance
    costs: Mapping[Phase, QuadraticCost]
    geometry: Geometry

    def phases(self) -> tuple[list[dispatch.Phase], dispatch.Phase]:
        """The encoders and the language model, for an orchestrator."""
        balanced = self.balance in _PADDED
        encoders = []
        for modality, weight in zip(MODALITIES, (3 * self.geometry.patch**2, 2 * self.geometry.bins), strict=True):
            policy = self._policy(modality, padded=modality in _PADDED[self.balance]) if balanced else None
            encoders.append(
                dispatch.Phase(modality, policy, bytes_in=weight * _FLOAT, bytes_out=self.geometry.width * _FLOAT)
            )
        return encoders, self._llm(balanced=balanced)

    def dealt(self, drawn: Minibatch) -> Minibatch:
        """What each rank loads of what was drawn: the same, but under pre-balancing. Pure; waits for nobody."""
        if self.balance != "llm-only":
            return drawn
        where_drawn = [dispatch.Phase(modality, None) for modality in MODALITIES]
        everyone = [records(mine) for mine in drawn.drawn]
        return Minibatch(dispatch.plan_step(everyone, where_drawn, self._llm(balanced=True)).llm.apply(drawn.drawn))

    def _llm(self, *, balanced: bool) -> dispatch.Phase:
        return dispatch.Phase("llm", self._policy("llm", padded=False) if balanced else None, bytes_in=2 * _FLOAT)

    def _policy(self, phase: Phase, *, padded: bool) -> BalancePolicy:
        cost = self.costs[phase]
        return BalancePolicy("full" if padded else "none", alpha=1.0, beta=cost.b / cost.a)


def records(examples: Sequence[Example]) -> Records:
    """What one rank drew, as planners read it."""
    parts = [
        [
            (TEXT, part.length) if isinstance(part, Text) else (part.modality, part.encoded, part.length)
            for part in example.parts
        ]
        for example in examples
    ]
    return Records.of(parts, MODALITIES)
