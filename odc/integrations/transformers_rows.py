"""The guard of `OdcTrainer(max_tokens=...)` for collators that lay the samples of a microbatch end to end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from odc.errors import ConfigError, UnsupportedError
from odc.model_copies import LENGTHS, Alone, alone, apart, gradient_of

_LIMIT = 1e-3  # of a norm: rounding makes less than 1e-4 of it, samples that see each other more than 1e-2


def refuse_mixed_rows(model: Any, loader: Any) -> None:
    """Raise ConfigError if `loader` joins samples in one row and a row of `model` does not keep them apart.

    Joins two samples of the dataset to see, and runs a small copy of a causal language model with the model's attention
    on the CPU. FlashAttention, which is not there, is not checked.
    """
    from transformers import AutoModelForCausalLM

    config: Any = getattr(model, "config", None)  # a module of one's own has none
    if len(loader.dataset) < 2 or type(config) not in AutoModelForCausalLM._model_mapping:
        return
    attention = str(config._attn_implementation)
    if attention not in ("eager", "sdpa"):
        return
    with torch.random.fork_rng([]):  # a collator may draw
        joined = loader.collate_fn([loader.dataset[0], loader.dataset[1]])
    if "input_ids" not in joined or joined["input_ids"].shape[0] > 1:
        return
    name = config.model_type
    try:
        right = alone(config)
        found = _error(right, attention, joined)
    except (UnsupportedError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"odc cannot check that {name} models keep the samples of a row apart: {error}") from error
    if not found <= _LIMIT:
        raise ConfigError(
            f"the collator lays samples end to end in one row, where {name} models with {attention!r} attention do not "
            f"keep them apart: output or gradients are off by {found:.1e} of their norm (allowed: {_LIMIT:.0e}). Use a "
            "collator that pads, or one that gives position_ids and no attention_mask"
        )


def _error(right: Alone, attention: str, joined: Any) -> float:
    """How far logits or gradients of one row of two samples, with the inputs of `joined`, are from those of each alone.

    Models of transformers take restarting positions for borders only where there is no mask.
    """
    with torch.device("cpu"):  # where the copy is
        model = right.like(attention)
        given = {"input_ids": torch.cat(right.documents)[None]}
        if "position_ids" in joined:
            given["position_ids"] = torch.cat([torch.arange(length) for length in LENGTHS])[None]
        if "attention_mask" in joined and joined["attention_mask"].ndim == 2:
            given["attention_mask"] = torch.ones_like(given["input_ids"])
        logits: Tensor = model(**given, use_cache=False).logits[0]
        for own, document in zip(logits.split(LENGTHS), right.documents, strict=True):
            cross_entropy(own[:-1], document[1:], reduction="sum").backward(retain_graph=True)
    errors = apart(logits.detach(), right.output), apart(gradient_of(model), right.gradient)
    return float(torch.tensor(errors).max())  # NaN where one of them is
