"""The sizes of a decoder-only transformer, read from a Hugging Face config under whichever names its type uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from odc.errors import PlanError

# Models whose MLP has two matrices although their config names the sizes like the gated ones.
TWO_MATRICES = frozenset(
    {"apertus", "arcee", "biogpt", "codegen", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "jais2", "nanochat"}
    | {"nemotron", "opt", "persimmon", "phi", "stablelm_alpha", "starcoder2"}
)

# Each size's names; of several that a config has, the first counts.
_HIDDEN = ("hidden_size", "n_embd")
_LAYERS = ("num_hidden_layers", "n_layer")
_HEADS = ("num_attention_heads", "n_head")
_INTERMEDIATE = ("intermediate_size", "ffn_dim", "n_inner")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_k")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SPARSE_STEP = ("decoder_sparse_step", "moe_layer_interval")
_FIRST_SPARSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")

# How the fields begin that a config has only for layers of another kind.
_OTHER_LAYERS = {
    "kv_lora_rank": "latent attention",
    "mamba_": "state-space layers",
    "attn_layer_": "attention in some layers only",
    "lru_width": "recurrent layers",
    "block_types": "recurrent layers",
    "conv_L_cache": "convolutions",
    "kv_channels": "experts in attention",
    "keep_window_size": "attention to chosen tokens",
    "H_cycles": "layers that run several times",
}
# The same in configs without `layer_types`; where a config has them, only the kinds that they list count.
_UNLISTED_LAYERS = {
    "linear_": "linear attention",
    "full_attention_interval": "linear attention",
    "attention_chunk_size": "chunked attention",
    "sliding_window_size": "convolutions beside attention",
}

# Types in which full attention and windows alternate, although a config without `layer_types` does not say so: period
# and offset, where (layers + offset) // period layers have full attention.
_TURNS = {
    **dict.fromkeys(("gemma2", "gpt_oss", "vaultgemma"), (2, 0)),
    **dict.fromkeys(("afmoe", "cohere2", "olmo3"), (4, 0)),
    "gemma3n_text": (5, 0),
    "gemma3_text": (6, 0),
    "modernbert-decoder": (3, 2),  # the first of each period, not the last
    **dict.fromkeys(("cwm", "granite_swa", "granitemoe_swa"), (4, 3)),
    **dict.fromkeys(("beam", "gemma4_text", "gemma4_unified_text"), (6, 5)),  # and always the last layer
    "mimo_v2_flash": (6, 6),  # and always the first layer
    "flint": (4, 9),  # and always the first two and the last
    **dict.fromkeys(("cohere_compass_text", "laguna", "mellum"), (1, 0)),  # all layers
}
# Types that have windows only where `use_sliding_window` says so.
_OPT_IN = frozenset({
    "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text", "qwen3",
    "qwen3_moe", "smollm3",
})  # fmt: skip


@dataclass(frozen=True)
class ModelSizes:
    """The arguments of `transformer_cost`, which explains them, but for recomputation."""

    hidden: int
    layers: int
    intermediate: float  # mean over layers
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool
    windows: tuple[int, ...]
    sparse_layers: int = 0
    experts: int = 0
    top_k: int = 0
    expert_intermediate: float = 0
    shared_intermediate: float = 0


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a multimodal config, its `text_config`; any other config itself."""
    text = config.get("text_config")
    return text if "hidden_size" not in config and isinstance(text, Mapping) else config


def sizes_of(config: Mapping[str, Any]) -> ModelSizes:
    """The sizes in a config (its dict or parsed config.json); of a multimodal one, those of its `text_config`.

    Raises PlanError naming a key that is missing or holds no number, and for layers of a kind that is not counted.
    """
    try:
        return _sizes_of(text_config(config))
    except PlanError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:  # a field of another type than is known
        raise PlanError(f"the cost model does not understand the model's config: {error}") from error


def _sizes_of(config: Mapping[str, Any]) -> ModelSizes:
    known = config.get("layer_types") is not None or config.get("model_type") in _TURNS
    others = _OTHER_LAYERS if known else _OTHER_LAYERS | _UNLISTED_LAYERS
    for begin, what in others.items():
        found = next((name for name, value in config.items() if name.startswith(begin) and value), None)
        if found is not None:
            raise PlanError(f"the cost model does not know {what} ({found}); use transformer_cost or a fit")
    hidden, layers, heads = (int(_number(config, *names)) for names in (_HIDDEN, _LAYERS, _HEADS))
    return ModelSizes(
        hidden=hidden,
        layers=layers,
        intermediate=_intermediate(config),
        vocab=int(_number(config, "vocab_size")),
        heads=heads,
        kv_heads=int(_number(config, "num_key_value_heads", default=1 if config.get("multi_query") else heads)),
        head_dim=int(_number(config, "head_dim", default=hidden // max(1, heads))),
        gated=config.get("model_type") not in TWO_MATRICES,
        windows=_windows(config, layers),
        **_experts(config, layers),
    )


def _number(config: Mapping[str, Any], *names: str, default: float | None = None) -> float:
    """The first of the fields `names` that is there and not null; without a default, PlanError if there is none."""
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None and default is None:
        raise PlanError(f"the model's config has no {names[0]!r}, which the cost model needs")
    value = default if name is None else config[name]
    if not isinstance(value, (int, float)):
        raise PlanError(f"the model's config has no number as its {name!r}, but {value!r:.40}")
    return value


def _intermediate(config: Mapping[str, Any]) -> float:
    """Width of an MLP: of a list, one entry a layer, the mean, which has the same total."""
    by_layer = config.get("intermediate_size")
    if isinstance(by_layer, (list, tuple)) and by_layer:
        return sum(_number({"intermediate_size": one}, "intermediate_size") for one in by_layer) / len(by_layer)
    # GPT-2 and its kin leave the width out where it is the usual one.
    kin = config.get("n_embd") and config.get("model_type") in TWO_MATRICES
    usual = 4 * _number(config, "n_embd") if kin else None
    return _number(config, *_INTERMEDIATE, default=usual)


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The window of every layer that has one."""
    kinds, model_type = config.get("layer_types"), str(config.get("model_type"))
    if kinds is not None:
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown:
            raise PlanError(f"the cost model does not know layers of type {', '.join(sorted(unknown))}")
    if config.get("sliding_window") is None or not config.get("use_sliding_window", model_type not in _OPT_IN):
        return ()
    if kinds is not None:
        count = list(kinds).count("sliding_attention")
    elif model_type in _TURNS or config.get("sliding_window_pattern"):
        period, offset = _TURNS.get(model_type, (0, 0))
        every = _number(config, "sliding_window_pattern", "global_attn_every_n_layers", default=period)
        count = layers - (layers + offset) // int(every)
    else:
        count = layers - int(_number(config, "max_window_layers", default=0))
    return (int(_number(config, "sliding_window")),) * max(0, count)


def _experts(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The fields of `ModelSizes` for a mixture of experts; none for a dense model."""
    experts = int(_number(config, *_EXPERTS, default=0))
    if not experts:
        return {}
    width = _number(config, "moe_intermediate_size", default=_intermediate(config))
    shared = _number(config, "shared_expert_intermediate_size", default=0)
    shared += _number(config, *_SHARED_EXPERTS, default=0) * width
    return {
        "sparse_layers": _sparse_layers(config, layers),
        "experts": experts,
        "top_k": int(_number(config, *_TOP_K)),
        "expert_intermediate": width,
        "shared_intermediate": shared,
    }


def _sparse_layers(config: Mapping[str, Any], layers: int) -> int:
    """How many layers have experts."""
    if config.get("mlp_layer_types") is not None:
        return list(config["mlp_layer_types"]).count("sparse")
    every, dense = int(_number(config, *_SPARSE_STEP, default=1)) or 1, config.get("mlp_only_layers") or ()
    first = int(_number(config, *_FIRST_SPARSE, default=0))
    last = int(_number(config, "moe_layer_end_index", default=-1))  # -1: the last of all
    return sum(i not in dense and (i + 1) % every == 0 for i in range(first, layers if last < 0 else last + 1))
