"""Machines and models by name, from data sheets and public configs, for `odc simulate` and the reproduction page."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odc.balance.model_sizes import ModelSizes, sizes_of, text_config
from odc.errors import ConfigError, PlanError


@dataclass(frozen=True)
class Machine:
    """One kind of accelerator and its links."""

    flops: float  # dense bf16 peak, per second
    intra_bandwidth: float  # bytes/s of one rank in the node, each direction
    inter_bandwidth: float  # the same to other nodes
    ranks_per_node: int = 8  # accelerators in a node
    intra_latency: float = 3e-6  # seconds for each hop or transfer
    inter_latency: float = 10e-6
    call_seconds: float = 25e-6  # host time of each collective or transfer


_FREE = math.inf
MACHINES: dict[str, Machine] = {
    "a100-free": Machine(312e12, _FREE, _FREE, 8, 0.0, 0.0, 0.0),  # A100 with free links: compute and waiting only
    "a100-roce": Machine(312e12, 300e9, 12.5e9),  # A100-80G, NVSwitch, 800 Gbps RoCE a node (the ODC paper's)
    "a100": Machine(312e12, 300e9, 25e9),  # A100-80G, NVSwitch, 200 Gbps InfiniBand for each GPU
    "h100": Machine(989e12, 450e9, 50e9),  # H100 SXM, NVSwitch, 400 Gbps for each GPU; H200 alike
    "mi300x": Machine(1307e12, 336e9, 50e9),  # MI300X, 7 xGMI links of 48 GB/s, 400 Gbps for each GPU
}


def _qwen(
    hidden: int, layers: int, intermediate: int, heads: int, kv_heads: int, vocab: int = 152064
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


# Types whose head is the embedding unless their config says otherwise.
_TIED = frozenset(
    {"biogpt", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "falcon", "gemma", "gemma2", "gemma3_text"}
    | {"gemma3n_text", "gemma4_text", "gpt2", "gpt_bigcode", "opt", "smollm3", "starcoder2", "vaultgemma"}
)

#: Sizes as in the public configs of DeepSeek-R1-Distill-Qwen. Qwen2.5's are the same, but 1.5B's head is its embedding.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": _qwen(1536, 28, 8960, 12, 2, 151936),
    "qwen2.5-7b": _qwen(3584, 28, 18944, 28, 4),
    "qwen2.5-14b": _qwen(5120, 48, 13824, 40, 8),
    "qwen2.5-32b": _qwen(5120, 64, 27648, 40, 8),
}


def machine_named(name: str) -> Machine:
    """The machine called `name`; raises ConfigError listing the names."""
    if name not in MACHINES:
        raise ConfigError(f"machine: there is no {name!r}; there are {', '.join(MACHINES)}")
    return MACHINES[name]


def config_named(name: str) -> dict[str, Any]:
    """The config called `name`, or the one in a config.json or a folder that has one; raises ConfigError."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name, "config.json") if os.path.isdir(name) else Path(name)
    if not os.path.isfile(path):  # unlike Path's, no error where the name is too long for a file
        raise ConfigError(f"model: {name!r} is neither a config file nor one of {', '.join(MODELS)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"model: cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model: {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model: {path} does not hold a config")
    return config


def sizes_of_model(config: dict[str, Any]) -> ModelSizes:
    """The sizes in a config; raises ConfigError where `sizes_of` raises PlanError."""
    try:
        return sizes_of(config)
    except PlanError as error:
        raise ConfigError(f"model: {error}") from error


def kv_width(config: dict[str, Any]) -> int:
    """Numbers that one token's keys and values in one layer consist of."""
    sizes = sizes_of_model(config)
    return 2 * sizes.kv_heads * sizes.head_dim


def parameter_counts(config: dict[str, Any]) -> tuple[float, float]:
    """Parameters of all layers, and of embeddings and head, of a dense decoder-only config or one with experts.

    Norms, biases and embeddings of positions are left out. Raises ConfigError naming a missing key.
    """
    sizes, text = sizes_of_model(config), text_config(config)
    matrices = sizes.hidden * (3 if sizes.gated else 2)  # of an MLP, for each unit of its width
    attention = 2 * sizes.hidden * sizes.head_dim * (sizes.heads + sizes.kv_heads)
    expert_widths = sizes.experts * sizes.expert_intermediate + sizes.shared_intermediate
    mlps = (sizes.layers - sizes.sparse_layers) * matrices * sizes.intermediate
    mlps += sizes.sparse_layers * (sizes.hidden * sizes.experts + matrices * expert_widths)
    tied = text.get("tie_word_embeddings", text.get("model_type") in _TIED)
    root = sizes.hidden * sizes.vocab * (1 if tied else 2)
    if width := text.get("hidden_size_per_layer_input"):  # Gemma's embeddings that every layer has for itself
        root += sizes.layers * width * text.get("vocab_size_per_layer_input", sizes.vocab)
    return float(sizes.layers * attention + mlps), float(root)
