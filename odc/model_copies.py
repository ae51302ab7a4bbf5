"""Small copies of transformers' language models on the CPU, to check how a model treats several documents in one row.

A copy has the config's kinds of layers and random weights, but few heads, experts and ids, and windows shorter than the
two random documents that it is given.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from odc.errors import UnsupportedError

LENGTHS, _WINDOW = (23, 17), 7  # tokens of the documents, and of the copy's windows
_MOST_PARAMETERS = 1 << 26  # of a copy

# Fields of a config, by what becomes of them in the copy: at most this, if they are ints (or lists of them).
_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size", "local_attention")
_IDS = {"vocab_size": 128, "vocab_size_per_layer_input": 128}
_WIDTHS = dict.fromkeys(
    ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "ffn_hidden_size"), 96
)
_RANKS = {"q_lora_rank": 64, "kv_lora_rank": 64}
_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "n_group", "topk_group"), 2),
}
_HEADS = 4


class Alone(NamedTuple):
    """A copy under its own eager attention, and what it makes of `documents`, each alone.

    `output` are the logits of all, [tokens, vocabulary]; `gradient` is that of their summed loss, of all parameters.
    """

    config: Any
    model: Any
    documents: tuple[Tensor, ...]
    output: Tensor
    gradient: Tensor

    def like(self, attention: str) -> Any:
        """A model with the same weights and another attention."""
        from transformers import AutoModelForCausalLM

        config = copy.deepcopy(self.config)
        with torch.device("cpu"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
        model.to(self.output.dtype).eval().load_state_dict(self.model.state_dict())
        return model


def alone(config: Any) -> Alone:
    """The smallest copy of `config`, transformers' of a causal language model, that runs; `config` is not changed.

    Raises UnsupportedError if none does.
    """
    failure: Exception | None = None
    for small in _copies(config):
        for dtype in (torch.float64, torch.float32):  # some masks do not fit into fp64
            try:
                with torch.device("cpu"):  # whatever torch's default device is
                    return _run(small, dtype)
            except Exception as error:  # of transformers' code for this config
                failure = error
    raise UnsupportedError(f"no small copy of it runs to check it: {type(failure).__name__}: {failure}") from failure


def _run(config: Any, dtype: torch.dtype) -> Alone:
    from transformers import AutoModelForCausalLM

    if sum(parameter.numel() for parameter in _shapes(config).parameters()) > _MOST_PARAMETERS:
        raise UnsupportedError("a small copy of it would have too many parameters")
    own = copy.deepcopy(config)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed every GPU's too, which nothing puts back
        model = AutoModelForCausalLM.from_config(own, attn_implementation="eager", dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    _move(model.to(dtype).eval(), draw)
    ids = torch.randint(min(config.get_text_config().vocab_size, *_IDS.values()), (sum(LENGTHS),), generator=draw)
    documents, outputs = ids.split(LENGTHS), []
    for document in documents:
        logits = model(input_ids=document[None], use_cache=False).logits[0]
        cross_entropy(logits[:-1], document[1:], reduction="sum").backward()
        outputs.append(logits.detach())
    return Alone(config, model, documents, torch.cat(outputs), gradient_of(model))


def _copies(config: Any) -> Iterator[Any]:
    """Copies of the config from small to large, all with short windows; of two, the first has fewer layers."""
    for most in ({**_IDS, **_WIDTHS, **_RANKS, **_EXPERTS}, {**_IDS, **_WIDTHS}, _IDS):
        copied = copy.deepcopy(config)
        copied._experts_implementation = "eager"  # others take no fp64
        for one in _parts(copied):
            _shrink(one, dict.fromkeys(_WINDOWS, _WINDOW) | most, heads=len(most) > len(_IDS) + len(_WIDTHS))
        with contextlib.suppress(Exception):  # of transformers' code for this config; the next one may be right
            yield _cut(copied)
        yield copied


def _shapes(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return model


def _cut(config: Any) -> Any:
    """The config with no more layers, from the first on, than it takes for each kind of layer to occur."""
    depth = config.get_text_config().num_hidden_layers
    stacks = [one for one in _shapes(config).modules() if isinstance(one, nn.ModuleList) and len(one) == depth]
    kinds = [tuple(map(_kind, layers)) for layers in zip(*stacks, strict=True)]
    least = max(2, 1 + max(kinds.index(kind) for kind in set(kinds)))
    cut = copy.deepcopy(config)
    text = cut.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(text, name, value[:least])
    text.num_hidden_layers = min(depth, least)
    return cut


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """What distinguishes one layer from others: its modules and their settings, save for numbers of layers."""
    return tuple(
        (name, type(module), *((key, value) for key, value in sorted(vars(module).items()) if _is_setting(key, value)))
        for name, module in layer.named_modules()
    )


def _is_setting(name: str, value: Any) -> bool:
    return (value is None or isinstance(value, (bool, int, str))) and not re.search("idx|index|layer_(id|num)", name)


def _parts(config: Any) -> Iterator[Any]:
    """The config and those of the models that it consists of."""
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _parts(part)


def _shrink(config: Any, most: dict[str, int], *, heads: bool) -> None:
    for name, limit in most.items():
        value = getattr(config, name, None)
        if isinstance(value, list) and all(isinstance(one, int) for one in value):
            setattr(config, name, [min(one, limit) for one in value])
        elif isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, min(value, limit))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(getattr(config, name, None), (int, list)):
            setattr(config, name, 0)
    own = getattr(config, "num_attention_heads", None)
    if not heads or not isinstance(own, int) or own <= _HEADS:
        return
    keys = getattr(config, "num_key_value_heads", None)
    if isinstance(keys, int):  # one, as many as queries have, or something between
        config.num_key_value_heads = _HEADS if keys == own else min(keys, 2)
    config.num_attention_heads, config.hidden_size = _HEADS, config.hidden_size // own * _HEADS


@torch.no_grad()
def _move(model: nn.Module, draw: torch.Generator) -> None:
    """Moves weights a little, so that attention matters and no gate is 0."""
    for parameter in model.parameters():
        scale = 0.1 if parameter.ndim < 2 else 0.5 * parameter.shape[-1] ** -0.5
        parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=scale)


def gradient_of(model: nn.Module) -> Tensor:
    """The gradients of all parameters, one after the other; leaves none."""
    rows = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return torch.cat([row.flatten() for row in rows])


def apart(one: Tensor, other: Tensor) -> float:
    """How far `one` is from `other`, as a share of its norm."""
    return float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-300))
