"""The check that documents of one packed row stay apart, run once a job on a small copy of the model, on the CPU.

The copy has the config's layers and random weights, but few heads, experts and ids, and a window shorter than the
documents. Two random documents run in one row, as in training, and each alone under the model's own eager attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from odc.errors import OdcError, UnsupportedError
from odc.experiments.data.documents import Document
from odc.experiments.data.packing import pack
from odc.experiments.text.attention import document_attention, window_mask
from odc.experiments.text.loss import use_document_loss
from odc.model_copies import Alone, alone, apart, gradient_of

_LIMIT = 1e-3  # of a norm: rounding makes less than 1e-4 of it, documents that see each other more than 1e-2
_COUNTED = "odc_documents_counted"

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
    right = alone(config)
    row = pack([Document("", one.numpy().astype(np.int32), np.ones(len(one), bool)) for one in right.documents])
    try:
        with torch.device("cpu"):  # where the copy is
            model, asked = _trained(right)
            with torch.no_grad():
                packed = model(**row.model_inputs(labels=False)).logits[0]
            use_document_loss(model)(**row.model_inputs()).backward()
    except UnsupportedError:
        raise
    except Exception as error:  # of a model's own code
        raise UnsupportedError(f"with attention per document it fails with {type(error).__name__}: {error}") from error
    layers = int(right.config.get_text_config().num_hidden_layers)
    return PackingError(apart(packed, right.output), apart(gradient_of(model), right.gradient), len(asked), layers)


def _verdict(config: Any) -> str | None:
    """Why the model cannot be trained on packed documents; None if it can."""
    name = config.model_type
    try:
        found = packing_error(config)
    except UnsupportedError as error:
        return f"{name} models cannot be trained on packed documents: {error}"
    if found.output <= _LIMIT and found.gradient <= _LIMIT:
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


def _trained(right: Alone) -> tuple[Any, set[int]]:
    """A model with the attention of training; layers that ask for it with lengths appear in the set returned."""
    from transformers import AttentionInterface, AttentionMaskInterface

    asked: set[int] = set()

    def counted(module: nn.Module, *args: Any, **options: Any) -> Any:
        if options.get("cu_seq_lens_q") is not None:
            asked.add(id(module))
        return document_attention(module, *args, **options)

    AttentionInterface.register(_COUNTED, counted)
    AttentionMaskInterface.register(_COUNTED, window_mask)
    return right.like(_COUNTED), asked
