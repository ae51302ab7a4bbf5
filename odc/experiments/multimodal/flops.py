"""Useful FLOPs of a multimodal minibatch: what the models must compute without any padding or dummy.

Chose the closed forms of `odc.balance.flops`, for encoders with whole instead of causal attention (twice the pairs).
This is the numerator of the paper's MFU (section 8, "we universally calculate effective GPU FLOPs without paddings").
Backward counts as twice forward everywhere, although nothing is differentiated by pixels and spectrograms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from odc.balance import QuadraticCost
from odc.balance.cost import cost_from_config, transformer_cost
from odc.errors import ConfigError
from odc.experiments.data.tokenizer import ByteTokenizer
from odc.experiments.multimodal.minibatch import PHASES, Minibatch, Phase
from odc.experiments.multimodal.model import ModelConfig


def phase_costs(config: ModelConfig) -> dict[Phase, QuadraticCost]:
    """FLOPs to train on one item of each phase, by its length inside that phase's model; connectors with encoders."""
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


def useful_flops(minibatch: Minibatch, costs: Mapping[Phase, QuadraticCost]) -> float:
    """Of all phases and ranks."""
    return sum(costs[phase](length) for phase in PHASES for mine in minibatch.lengths(phase) for length in mine)


def _encoder(hidden: int, layers: int, intermediate: int) -> QuadraticCost:
    """Blocks alone, attention to all positions of an item."""
    cost: Any = transformer_cost(hidden, layers, intermediate, vocab=1, gated=False)
    return QuadraticCost(cost.a - _PASSES * hidden, 2 * cost.b)


def _plus(cost: QuadraticCost, weights: int) -> QuadraticCost:
    """With further matrices of so many weights that every position passes."""
    return QuadraticCost(cost.a + _PASSES * weights, cost.b)


_PASSES = 3 * 2  # forward and twice in backward, multiply and add
