"""The check on first use: one random sample run whole and split, in one process and without any exchange.

The pieces of the sample are the rows of one batch. Whatever the model does with a row by itself (positions, windows,
mixing of tokens that is not attention) then shows as a difference between the two outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from odc.balance.slices import zigzag
from odc.errors import OdcError, UnsupportedError
from odc.split.attention import attend_blocks
from odc.split.cut import Cut

TOKENS, _PIECES, _IDS = 64, 2, 1000
# Of the norm of the whole sample's output: what rounding may make of it, and far below what a wrong model does.
_LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF = 0.05
_SHARE = 0.5  # of the difference that is there when the pieces do not see each other


@dataclass
class Rehearsal:
    """What takes the place of a piece: row r of the batch is place r.

    Args:
        cut: of the sample.
        alone: every place sees only its own tokens, as if nothing was exchanged.
    """

    cut: Cut
    alone: bool = False
    row_bytes: dict[int, int] = field(default_factory=dict)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int | None) -> Tensor:
        """See `odc.split.attend`, with a row for every place."""
        self.row_bytes[layer] = 2 * key.shape[1] * key.shape[3] * key.itemsize
        parts = {place: torch.cat([key[place : place + 1], value[place : place + 1]]) for place in range(len(key))}
        outs = []
        for place in parts:
            blocks = self.cut.blocks(place, window)
            if self.alone:
                blocks = [block for block in blocks if block.owner == place]
            outs.append(attend_blocks(query[place : place + 1], parts, blocks, scale).out)
        return torch.cat(outs)


@torch.no_grad()
def rehearse(model: nn.Module, layers: int, extra: dict[str, Any]) -> int:
    """Run the check; returns the bytes that keys and values of one token take in the layer where they take most.

    Args:
        model: called as with a piece, three times, without gradients. On all ranks of a sharded model.
        layers: attention layers it has.
        extra: keyword arguments it needs with a piece.

    Raises UnsupportedError: the outputs differ, or not every layer asked for the piece; names the difference.
    """
    name, device = type(model).__name__, next(model.parameters()).device
    cut = Cut(zigzag(TOKENS, _PIECES))
    vocabulary = int(getattr(getattr(model, "config", None), "vocab_size", 2))
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(min(vocabulary, _IDS), (TOKENS,), generator=draw).to(device)
    positions = torch.arange(TOKENS, device=device)
    options = {key: value for key, value in extra.items() if key != "attention_mask"}
    whole = _output(model(input_ids=tokens[None], position_ids=positions[None], **options))[0]
    rows = torch.stack([cut.positions(place, device) for place in range(_PIECES)])
    found = {}
    for alone in (False, True):
        rehearsal = Rehearsal(cut, alone)
        try:
            split = _output(model(input_ids=tokens[rows], position_ids=rows, odc_piece=rehearsal, **extra))
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, OdcError):
                raise
            raise UnsupportedError(
                f"samples of {name} cannot be split: run with `odc_piece` it fails with {type(error).__name__}: {error}"
            ) from error
        missing = sorted(set(range(layers)) - set(rehearsal.row_bytes))
        if missing or len(rehearsal.row_bytes) != layers:
            raise UnsupportedError(
                f"samples of {name} cannot be split: of its {layers} layers these did not hand their attention over: "
                f"{', '.join(map(str, missing)) or 'none'}; it was called for layers {sorted(rehearsal.row_bytes)}"
            )
        found[alone] = _apart(split, whole[rows])
    limit = min(_LIMITS.get(whole.dtype, _HALF), _SHARE * found[True])
    if not found[False] <= limit:
        raise UnsupportedError(
            f"samples of {name} cannot be split: a sample of {TOKENS} tokens in {_PIECES} pieces gives outputs that "
            f"differ from the whole sample's by {found[False]:.1e} of their norm, more than {limit:.1e} for "
            f"{whole.dtype} (pieces that do not see each other differ by {found[True]:.1e}). Some layer treats a "
            "piece as a sample of its own"
        )
    return max(rehearsal.row_bytes.values())


def _output(given: Any) -> Tensor:
    found = given if isinstance(given, Tensor) else getattr(given, "logits", None)
    if found is None:
        found = given[0]
    if not isinstance(found, Tensor):
        raise UnsupportedError(f"the model returns {type(found).__name__}, not logits [rows, tokens, ...]")
    return found


def _apart(one: Tensor, other: Tensor) -> float:
    one, other = one.double(), other.double()
    return float((one - other).norm() / other.norm().clamp_min(1e-300))
