"""What a model passes to its layers as `odc_piece`, and a guard over the positions of the piece.

A model that was not given a piece's positions would count them from 0, and nothing would fail.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from torch import Tensor, nn

from odc.errors import UnsupportedError
from odc.split._torch_private import without_dynamo

_guarded = "_odc_guards_positions"


class Attends(Protocol):
    """A piece of a split sample, or a rehearsal of one."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int | None) -> Tensor:
        """Attention over the whole sample; shapes as `odc.split.attend`."""
        ...


class PieceHandle:
    """What a model passes to its layers as `odc_piece`.

    A piece is a dataclass, which FSDP copies where it casts a module's arguments (`cast_forward_inputs`); this is none.

    Attributes:
        positions: of the piece's tokens in the sample, int64 [1, tokens of the piece].
        vouched: the model was given these positions.
    """

    def __init__(self, piece: Attends, positions: Tensor) -> None:
        self.attend = piece.attend
        self.positions, self.vouched = positions, False


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
        names = list(inspect.signature(module.forward).parameters)
        given = dict(zip(names, args, strict=False)).get("position_ids")
    if not isinstance(given, Tensor):
        raise UnsupportedError(
            f"{type(module).__name__} was called with a piece of a split sample but without its position_ids, and "
            "would count its tokens from 0: pass all of SamplePiece.of(...).inputs"
        )
    if given is not handle.positions and not _same(given, handle.positions):
        raise UnsupportedError(
            f"{type(module).__name__} was called with a piece of a split sample and other position_ids than the "
            "piece's: pass those of SamplePiece.of(...).inputs as they are"
        )
    handle.vouched = True


def _same(given: Tensor, expected: Tensor) -> bool:
    """Whether the positions are alike; those that were made of tokens on the CPU may have moved to a device since."""
    return given.shape[-1:] == expected.shape[-1:] and bool((given == expected.to(given.device)).all())
