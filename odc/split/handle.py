"""What a model passes to its layers as `odc_piece`, and a guard over the positions of the piece and its forwards.

A model that was not given a piece's positions would count them from 0, and nothing would fail. One that ran a piece
again would wait for keys that no rank puts twice, or attend to those of other weights.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from torch import Tensor, nn

from odc.errors import OdcError, UnsupportedError
from odc.split._torch_private import is_in_backward, without_dynamo

_guarded = "_odc_guards_positions"


class Attends(Protocol):
    """A piece of a split sample, or a rehearsal of one."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int | None) -> Tensor:
        """Attention over the whole sample; shapes as `odc.split.attend`."""
        ...


class OneForward:
    """Whether a piece of a split sample, of so many handles, has run forward.

    Args:
        sample: index of the sample.
    """

    def __init__(self, sample: int) -> None:
        self._sample = sample
        self._begun: set[nn.Module] = set()

    def begin(self, module: nn.Module) -> None:
        """A model, or a model in it, begins to run the piece. OdcError if it did before; a recompute may."""
        if module in self._begun and not is_in_backward():
            raise OdcError(
                f"{type(module).__name__} was called again with a piece of sample {self._sample}, whose keys and "
                "values of its first forward other ranks have: a piece runs forward once. After a forward that failed "
                "call model.abandon_minibatch(reason); run another forward, such as that of a reference policy, with "
                "the whole sample, outside of the loop over pieces"
            )
        self._begun.add(module)


class PieceHandle:
    """What a model passes to its layers as `odc_piece`.

    A piece is a dataclass, which FSDP copies where it casts a module's arguments (`cast_forward_inputs`); this is none.

    Args:
        piece: attends for the layers.
        positions: of the piece's tokens in the sample, int64 [1, tokens of the piece].
        forward: of the piece, which runs once; None where it may run again.

    Attributes:
        vouched: the model was given these positions.
    """

    def __init__(self, piece: Attends, positions: Tensor, forward: OneForward | None = None) -> None:
        self.attend = piece.attend
        self.positions, self.forward, self.vouched = positions, forward, False


def guard(model: nn.Module) -> None:
    """Let `model`, and each model of transformers in it, refuse a piece without its `position_ids`, or a second time.

    Idempotent.
    """
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
    if handle.forward is not None:
        handle.forward.begin(module)
    handle.vouched = True


def _same(given: Tensor, expected: Tensor) -> bool:
    """Whether the positions are alike; those that were made of tokens on the CPU may have moved to a device since."""
    return given.shape[-1:] == expected.shape[-1:] and bool((given == expected.to(given.device)).all())
