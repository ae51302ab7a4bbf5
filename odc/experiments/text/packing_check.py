"""The check that documents of one packed row stay apart, run once a job on a small copy of the model, on the CPU.

The copy has the config's layers and random weights, but few heads, experts and ids, and a window shorter than the
documents. Two random documents run in one row, as in training, and each alone under the model's own eager attention.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from odc.errors import OdcError, UnsupportedError
from odc.experiments.data.documents import Document
from odc.experiments.data.packing import pack
from odc.experiments.text.attention import document_attention, register, window_mask
from odc.experiments.text.loss import use_document_loss

_LENGTHS, _WINDOW = (23, 17), 7  # tokens of the documents, and of the copy's windows
_LIMIT = 1e-3  # of a norm: rounding makes less than 1e-4 of it, documents that see each other more than 1e-2
_MOST_PARAMETERS = 1 << 26  # of a copy
_COUNTED = "odc_documents_counted"

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

_INSTEAD = (
    "Train another model, or use odc.integrations.transformers.OdcTrainer, which gives every document a row of its own"
)


class PackingError(NamedTuple):
    """How far two documents in one row are from each alone, as shares of a norm.

    Of the copy's `layers` layers `asked` gave the documents' lengths to odc's attention.
    """

    output: float
    gradient: float
    asked: int
    layers: int


_verdicts: dict[str, str | None] = {}  # by config; a comparison runs its arms in one process after the other


def check_documents(config: Any, longest: int) -> None:
    """Raise UnsupportedError if documents of at most `longest` tokens do not stay apart in a row of the model.

    `config` is transformers', of a causal language model, and is not changed. Takes a second or a few.
    """
    _refuse_rotary(config, longest)
    key = config.to_json_string(use_diff=False)
    if key not in _verdicts:
        _verdicts[key] = _verdict(config)
    if (verdict := _verdicts[key]) is not None:
        raise UnsupportedError(f"model: {verdict}. {_INSTEAD}")


def check_documents_once(config: Any, longest: int) -> None:
    """`check_documents` on rank 0 while the others wait; raises on all. Every rank calls it."""
    found: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            check_documents(config, longest)
        except OdcError as error:
            found = [str(error)]
    dist.broadcast_object_list(found, src=0)
    if found[0] is not None:
        raise UnsupportedError(found[0])


def packing_error(config: Any) -> PackingError:
    """What the check measures for a model of `config`; raises UnsupportedError if the model refuses packed rows."""
    small, model, draw = _small_model(config)
    ids = torch.randint(min(_vocabulary(small), *_IDS.values()), (sum(_LENGTHS),), generator=draw)
    try:
        outputs = [_alone(model, document) for document in ids.split(_LENGTHS)]
        gradient, output = _gradient(model), torch.cat(outputs)
        model, asked = _trained(small, model)
        row = pack([Document("", one.numpy().astype(np.int32), np.ones(len(one), bool)) for one in ids.split(_LENGTHS)])
        with torch.no_grad():
            packed = model(**row.model_inputs(labels=False)).logits[0]
        use_document_loss(model)(**row.model_inputs()).backward()
    except UnsupportedError:
        raise
    except Exception as error:  # of a model's own code
        raise UnsupportedError(f"with attention per document it fails with {type(error).__name__}: {error}") from error
    layers = int(small.get_text_config().num_hidden_layers)
    return PackingError(_apart(packed, output), _apart(_gradient(model), gradient), len(asked), layers)


def _verdict(config: Any) -> str | None:
    """Why the model cannot be trained on packed documents; None if it can."""
    name = config.model_type
    try:
        found = packing_error(config)
    except UnsupportedError as error:
        return f"{name} models cannot be trained on packed documents: {error}"
    if max(found.output, found.gradient) <= _LIMIT:
        return None
    return (
        f"documents of one row do not stay apart in {name} models: in a small copy the output of two in one is off by "
        f"{found.output:.1e} of its norm from that of each alone, the gradient of their loss by {found.gradient:.1e} "
        f"(allowed: {_LIMIT:.0e}); {found.asked} of its {found.layers} layers hand the documents' lengths to "
        "transformers' AttentionInterface, where odc keeps documents apart"
    )


def _refuse_rotary(config: Any, longest: int) -> None:
    """Rotary embeddings that follow the longest document of a row change the others in it."""
    given = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for one in (given, *(value for value in given.values() if isinstance(value, dict))):
        if one.get("rope_type") not in ("dynamic", "longrope"):
            continue
        reach = one.get("original_max_position_embeddings") or config.get_text_config().max_position_embeddings
        if longest > reach:
            raise UnsupportedError(
                f"model: documents of more than {reach} tokens change the rotary embedding ({one['rope_type']}) of "
                f"others in their row, and the longest has {longest}; split or drop those longer than {reach}"
            )


def _small_model(config: Any) -> tuple[Any, Any, torch.Generator]:
    """The smallest copy of the config that runs alone under eager attention, its model, and a generator."""
    from transformers import AutoModelForCausalLM

    failure: Exception | None = None
    for small in _copies(config):
        for dtype in (torch.float64, torch.float32):  # some masks do not fit into fp64
            try:
                if sum(parameter.numel() for parameter in _shapes(small).parameters()) > _MOST_PARAMETERS:
                    raise UnsupportedError("a small copy of it would have too many parameters")
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    model = AutoModelForCausalLM.from_config(
                        copy.deepcopy(small), attn_implementation="eager", dtype=torch.float32
                    )
                draw = torch.Generator().manual_seed(0)
                _move(model.to(dtype).eval(), draw)
                with torch.no_grad():
                    _alone(model, torch.arange(_LENGTHS[0]))
                return small, model, draw
            except Exception as error:  # of transformers' code for this config
                failure = error
    raise UnsupportedError(f"no small copy of it runs to check it: {type(failure).__name__}: {failure}") from failure


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


def _vocabulary(config: Any) -> int:
    return int(config.get_text_config().vocab_size)


@torch.no_grad()
def _move(model: nn.Module, draw: torch.Generator) -> None:
    """Moves weights a little, so that attention matters and no gate is 0."""
    for parameter in model.parameters():
        scale = 0.1 if parameter.ndim < 2 else 0.5 * parameter.shape[-1] ** -0.5
        parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=scale)


def _alone(model: Any, document: Tensor) -> Tensor:
    """Logits of one document; the gradient of its summed loss is added."""
    logits: Tensor = model(input_ids=document[None], use_cache=False).logits[0]
    if torch.is_grad_enabled():
        cross_entropy(logits[:-1], document[1:], reduction="sum").backward()
    return logits.detach()


def _trained(config: Any, like: nn.Module) -> tuple[Any, set[int]]:
    """A model with the attention of training; layers that ask for it with lengths appear in the set returned."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    asked: set[int] = set()

    def counted(module: nn.Module, *args: Any, **options: Any) -> Any:
        if options.get("cu_seq_lens_q") is not None:
            asked.add(id(module))
        return document_attention(module, *args, **options)

    register()
    AttentionInterface.register(_COUNTED, counted)
    AttentionMaskInterface.register(_COUNTED, window_mask)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=_COUNTED, dtype=torch.float32)
    model.to(next(like.parameters()).dtype).eval().load_state_dict(like.state_dict())
    return model, asked


def _gradient(model: nn.Module) -> Tensor:
    """The gradients of all parameters in one row; leaves none."""
    rows = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return torch.cat([row.flatten() for row in rows])


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-300))
