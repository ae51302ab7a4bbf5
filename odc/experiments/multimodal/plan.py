"""Where every phase of a minibatch is computed, under each way to balance (the table in docs/multimodal.md).

Decoding, padding and computing are the same code under every balance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from odc import dispatch
from odc.balance import QuadraticCost
from odc.balance.cost import cost_from_config, transformer_cost
from odc.dispatch import TEXT, BalancePolicy, Records
from odc.errors import ConfigError
from odc.experiments.data.bpe import ByteTokenizer
from odc.experiments.multimodal.examples import MODALITIES, PHASES, Example, ExampleBatch, Modality, Phase, Text
from odc.experiments.multimodal.model import ModelConfig, TowerGeometry

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
_PASSES = 3 * 2  # forward and twice in backward, multiply and add


@dataclass(frozen=True)
class Planning:
    """How minibatches are planned, the same on every rank; `costs` are FLOPs of an item of each phase by its length."""

    balance: Balance
    costs: Mapping[Phase, QuadraticCost]
    geometry: TowerGeometry

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

    def dealt(self, drawn: ExampleBatch) -> ExampleBatch:
        """What each rank loads of what was drawn: the same, but under pre-balancing. Waits for no other rank."""
        if self.balance != "llm-only":
            return drawn
        where_drawn = [dispatch.Phase(modality, None) for modality in MODALITIES]
        everyone = [records(mine) for mine in drawn.drawn]
        return ExampleBatch(dispatch.plan_step(everyone, where_drawn, self._llm(balanced=True)).llm.apply(drawn.drawn))

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


def phase_costs(config: ModelConfig) -> dict[Phase, QuadraticCost]:
    """FLOPs to train on one item of each phase, by its length inside that phase's model; connectors with encoders.

    Closed forms of `odc.balance.cost`, for encoders with whole instead of causal attention (twice the pairs). Backward
    counts as twice forward everywhere, although nothing is differentiated by pixels and spectrograms.
    """
    vision, audio, text = (config.fields[f"{name}_config"] for name in ("vision", "audio", "text"))
    width = text["hidden_size"]
    wide = vision["embed_dim"]
    merged = vision["spatial_merge_size"] ** 2
    image = _encoder(wide, vision["depth"], int(wide * vision["mlp_ratio"]))
    image_ends = 3 * vision["patch_size"] ** 2 * wide + wide * (wide * merged) + wide * width
    d, joined = audio["d_model"], config.fields["audio_downsample"]
    clip = _encoder(d, audio["encoder_layers"], audio["encoder_ffn_dim"])
    # Per position after the stride: two frames through the first convolution, then the second; kernels are 3 wide.
    clip_ends = 2 * 3 * audio["num_mel_bins"] * d + 3 * d * d + d * d * joined + d * width
    language = cost_from_config({"model_type": "qwen2", **text, "vocab_size": ByteTokenizer.vocab_size})
    if not isinstance(language, QuadraticCost):
        raise ConfigError("model: text_config has layers with sliding windows, which are not counted here")
    return {"image": _plus(image, image_ends), "audio": _plus(clip, clip_ends), "llm": language}


def useful_flops(minibatch: ExampleBatch, costs: Mapping[Phase, QuadraticCost]) -> float:
    """Of all phases and ranks, without padding and dummies: the numerator of the paper's MFU (section 8)."""
    return sum(costs[phase](length) for phase in PHASES for mine in minibatch.lengths(phase) for length in mine)


def _encoder(hidden: int, layers: int, intermediate: int) -> QuadraticCost:
    """Blocks alone, attention to all positions of an item."""
    cost: Any = transformer_cost(hidden, layers, intermediate, vocab=1, gated=False)
    return QuadraticCost(cost.a - _PASSES * hidden, 2 * cost.b)


def _plus(cost: QuadraticCost, weights: int) -> QuadraticCost:
    return QuadraticCost(cost.a + _PASSES * weights, cost.b)
