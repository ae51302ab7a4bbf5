"""Machines and models by name, from data sheets and public configs, for `odc simulate` and the reproduction page."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odc.errors import ConfigError


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
    about: str = ""  # source


_FREE = math.inf
MACHINES: dict[str, Machine] = {
    "a100-free": Machine(312e12, _FREE, _FREE, 8, 0.0, 0.0, 0.0, "A100 with free links: compute and waiting only"),
    "a100-roce": Machine(312e12, 300e9, 12.5e9, about="A100-80G, NVSwitch, 800 Gbps RoCE a node (the ODC paper's)"),
    "a100": Machine(312e12, 300e9, 25e9, about="A100-80G, NVSwitch, 200 Gbps InfiniBand for each GPU"),
    "h100": Machine(989e12, 450e9, 50e9, about="H100 SXM, NVSwitch, 400 Gbps for each GPU; H200 alike"),
    "mi300x": Machine(1307e12, 336e9, 50e9, about="MI300X, 7 xGMI links of 48 GB/s, 400 Gbps for each GPU"),
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


#: Sizes as in the public configs; DeepSeek-R1-Distill-Qwen has those of Qwen2.5.
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
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise ConfigError(f"model: {name!r} is neither a config file nor one of {', '.join(MODELS)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model: {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model: {path} does not hold a config")
    return config


def kv_width(config: dict[str, Any]) -> int:
    """Numbers that one token's keys and values in one layer consist of."""
    config = config if "hidden_size" in config else config.get("text_config", config)
    return int(2 * (config.get("num_key_value_heads") or config["num_attention_heads"]) * _head_dim(config))


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def parameter_counts(config: dict[str, Any]) -> tuple[float, float]:
    """Parameters of all layers, and of embedding and head, of a dense decoder-only config or one with experts.

    Norms and biases are left out. Raises ConfigError naming a missing key.
    """
    config = config if "hidden_size" in config else config.get("text_config", config)
    try:
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        attention = 2 * hidden * (heads * _head_dim(config)) + hidden * kv_width(config)
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next((config[name] for name in names if config.get(name)), 0)
        width = (config.get("moe_intermediate_size") if experts else None) or config["intermediate_size"]
        mlp = 3 * hidden * width * max(1, experts) + hidden * experts
        root = hidden * config["vocab_size"] * (1 if config.get("tie_word_embeddings") else 2)
    except KeyError as error:
        raise ConfigError(f"model: the config has no {error.args[0]!r}") from error
    return float(layers * (attention + mlp)), float(root)
