"""Models of transformers: their attention takes an `odc_piece`; models that cannot be split are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from odc.errors import UnsupportedError
from odc.split.attention import attend

_PREFIX = "odc_split_"
_MARK = "_odc_splits"
#: Keywords that models hand down to every layer, and that attention does not depend on.
HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "labels",
    }
    | {"shift_labels", "num_items_in_batch", "logits_to_keep", "output_router_logits", "position_embeddings"}
)
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})


def is_of_transformers(model: nn.Module) -> bool:
    """Whether `model` is one of transformers, which `hook` may be called on."""
    return hasattr(model, "config") and hasattr(model, "set_attn_implementation")


def layers_of(model: nn.Module) -> int:
    """Attention layers of a model of transformers, by its config."""
    return int(model.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]


def windows_of(config: Any, layers: int) -> list[int | None]:
    """By layer the tokens that a token sees by a model's config, itself included; None sees all before it."""
    window = getattr(config, "sliding_window", None) or None
    if config is None or window is None or getattr(config, "use_sliding_window", None) is False:
        return [None] * layers
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in types]


def hook(model: nn.Module) -> dict[str, Any]:
    """Let the model's attention split a sample where it is given `odc_piece`; without one nothing changes.

    Returns further keyword arguments that the model needs with a piece. Raises UnsupportedError listing every reason
    why the model cannot be split. Idempotent.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    config: Any = model.config
    name = str(config._attn_implementation)
    reasons = [*_refusals(config.to_dict())]
    if model.training:
        dropouts = {one.p for one in model.modules() if isinstance(one, nn.Dropout) and one.p > 0}
        dropouts |= {one for one in (config.to_dict().get("attention_dropout"),) if one}
        if dropouts:
            reasons.append(f"it has a dropout of {max(dropouts)}: the pieces would drop otherwise than the whole")
    if name == "eager":
        reasons.append("its attention is 'eager': load it with attn_implementation='sdpa'")
    elif name not in AttentionInterface() or name not in AttentionMaskInterface():
        reasons.append(f"its attention {name!r} is not registered with transformers' AttentionInterface")
    if _scales_by_place(model):
        reasons.append("its attention scales queries by their place in the piece; in newer transformers it does not")
    if reasons:
        raise UnsupportedError(f"samples of {type(model).__name__} cannot be split: {'; '.join(reasons)}")
    _hand_over(model, name)
    # A mask of four dimensions is handed to the layers as it is: none is built, which for the positions of a zig-zag
    # piece would take their jumps for borders between packed samples.
    return {"use_cache": False, "attention_mask": torch.empty(1, 1, 0, 0, dtype=torch.bool)}


def _hand_over(model: nn.Module, name: str) -> None:
    """Give the model's layers the attention of pieces; `name` is that of their attention, which is registered."""
    from transformers import AttentionInterface, AttentionMaskInterface

    whole: Any = AttentionInterface()[name]
    if hasattr(whole, _MARK):
        return
    if "flash" in name or "/" in name:
        # transformers imports a library or a kernel of this name, and models compare it: it cannot be another one.
        AttentionInterface.register(name, _split_or(whole))
        return
    AttentionInterface.register(_PREFIX + name, _split_or(whole))
    AttentionMaskInterface.register(_PREFIX + name, AttentionMaskInterface()[name])
    model.set_attn_implementation(_PREFIX + name)  # type: ignore[operator]
    if model.config._attn_implementation != _PREFIX + name:  # type: ignore[union-attr]
        raise UnsupportedError(
            f"samples of {type(model).__name__} cannot be split: it does not hand its attention to transformers' "
            "AttentionInterface"
        )


def _split_or(whole: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function of transformers: that of a piece where there is one, else `whole`."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *given: Any,
        odc_piece: Any = None,
        **options: Any,
    ) -> Any:
        if odc_piece is None:
            return whole(module, query, key, value, attention_mask, *given, **options)
        return _attend(module, query, key, value, attention_mask, odc_piece, **options), None

    setattr(attention, _MARK, True)
    return attention


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    piece: Any,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> Tensor:
    layer = getattr(module, "layer_idx", None)
    unknown = sorted(name for name, one in others.items() if one is not None and name not in HARMLESS)
    reasons = [f"it passes {', '.join(unknown)} to attention"] if unknown else []
    if dropout:
        reasons.append(f"its attention has a dropout of {dropout}")
    if attention_mask is not None and attention_mask.numel():
        reasons.append("it builds an attention mask of its own")
    if is_causal is False or not getattr(module, "is_causal", True):
        reasons.append("its attention is not causal")
    if not isinstance(layer, int):
        reasons.append(f"{type(module).__name__} has no layer_idx")
    if reasons:
        raise UnsupportedError(f"samples of this model cannot be split: {'; '.join(reasons)} (layer {layer})")
    assert isinstance(layer, int)
    out: Tensor = attend(query, key, value, piece, layer, scale=scaling, window=sliding_window)
    return out.transpose(1, 2).contiguous()


def _refusals(config: dict[str, Any]) -> Iterator[str]:
    """Why a model with this config cannot be split."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for kind in {_rope_type(one) for one in [rope, *(one for one in rope.values() if isinstance(one, dict))]}:
        if kind in ("dynamic", "longrope"):
            yield f"its rotary embedding ({kind}) depends on how long the piece is, not the sample"
    strange = set(config.get("layer_types") or ()) - _KNOWN_LAYERS
    if strange:
        yield f"it has layers of type {', '.join(sorted(strange))}"
    if config.get("attention_chunk_size"):
        yield "it attends in chunks"
    if config.get("kv_lora_rank"):
        yield "its keys and values are latent (kv_lora_rank)"
    if config.get("attn_logit_softcapping"):
        yield "it caps the scores of attention (attn_logit_softcapping)"
    if config.get("alibi"):
        yield "it adds a bias by distance to attention (alibi)"
    if config.get("output_router_logits") or config.get("router_jitter_noise"):
        yield "its router's loss or noise is over whole samples (output_router_logits, router_jitter_noise)"
    if config.get("is_encoder_decoder") or config.get("add_cross_attention"):
        yield "it has an encoder"
    if any(isinstance(one, dict) and "hidden_size" in one for one in config.values()):
        yield "it consists of several models (vision or audio towers)"
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        yield "its attention is not causal"


def _scales_by_place(model: nn.Module) -> bool:
    """Whether attention scales late queries but takes no `position_ids`, as Ministral 3 of transformers 5.0."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    attention = [one for one in model.modules() if "layer_idx" in vars(one)]
    return bool(rope.get("llama_4_scaling_beta")) and any(
        "position_ids" not in signature(one.forward).parameters for one in attention
    )


def _rope_type(parameters: dict[str, Any]) -> Any:
    return parameters.get("rope_type") or parameters.get("type")
