"""A guard over the positions of a piece: a model that was not given them would count them from 0, and nothing fails."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from odc.errors import UnsupportedError
from odc.split._torch_private import without_dynamo
from odc.split.attention import PieceHandle

_guarded = "_odc_guards_positions"


def guard(model: nn.Module) -> None:
    """Let `model`, and each model of transformers in it, refuse a piece without its `position_ids`. Idempotent."""
    for module in model.modules():
        if module is not model and not hasattr(module, "get_input_embeddings"):
            continue
        if not hasattr(module, _guarded):
            setattr(module, _guarded, module.register_forward_pre_hook(_check, with_kwargs=True))


@without_dynamo
def _check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    handle = kwargs.get("odc_piece")
    if handle is None:
        handle = next((one for one in args if isinstance(one, PieceHandle)), None)
    if not isinstance(handle, PieceHandle):
        return
    given = kwargs.get("position_ids")
    if given is None:
        given = _by_place(module, args)
    if not isinstance(given, Tensor):
        raise UnsupportedError(
            f"{type(module).__name__} was called with a piece of a split sample but without its position_ids, and "
            "would count its tokens from 0: pass all of SamplePiece.of(...).inputs"
        )
    expected = handle.positions
    if given is not expected and not (given.shape[-1:] == expected.shape[-1:] and bool((given == expected).all())):
        raise UnsupportedError(
            f"{type(module).__name__} was called with a piece of a split sample and other position_ids than the "
            "piece's: pass those of SamplePiece.of(...).inputs as they are"
        )
    handle.vouched = True


def _by_place(module: nn.Module, args: tuple[Any, ...]) -> Any:
    names = list(inspect.signature(module.forward).parameters)
    return dict(zip(names, args, strict=False)).get("position_ids")
