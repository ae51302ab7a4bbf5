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
from odc.split.attention import PieceHandle, attend_blocks
from odc.split.cut import Cut

TOKENS, _PIECES, _IDS = 64, 2, 1000
# Of the norm of the whole sample's output: what rounding may make of it, and far below what a wrong model does.
_LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF = 0.05
_SHARE = 0.3  # of the difference that is there when the pieces do not see each other


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
        model: called four times, without gradients. On all ranks of a sharded model.
        layers: attention layers it has.
        extra: keyword arguments it needs with a piece.

    Raises UnsupportedError: the outputs differ, or not every layer asked for the piece; names the difference.
    """
    name, device = type(model).__name__, next(model.parameters()).device
    vocabulary = int(getattr(getattr(model, "config", None), "vocab_size", 2))
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(min(vocabulary, _IDS), (TOKENS,), generator=draw).to(device)
    options = {key: value for key, value in extra.items() if key != "attention_mask"}
    whole = _output(model(input_ids=tokens[None], position_ids=torch.arange(TOKENS, device=device)[None], **options))[0]
    cut = Cut(zigzag(TOKENS, _PIECES))
    one_row = Cut([sorted(slices for piece in cut.slices for slices in piece)])  # by the same blocks
    blocks = _run(model, layers, extra, tokens, Rehearsal(one_row))
    alone = _apart(_run(model, layers, extra, tokens, Rehearsal(cut, alone=True)), whole)
    split = Rehearsal(cut)
    apart = _apart(_run(model, layers, extra, tokens, split), blocks)
    limit = min(_LIMITS.get(whole.dtype, _HALF), _SHARE * alone)
    about = f"of their norm ({whole.dtype}; pieces that do not see each other differ by {alone:.1e})"
    if not apart <= limit:
        raise UnsupportedError(
            f"samples of {name} cannot be split: a sample of {TOKENS} tokens in {_PIECES} pieces gives outputs that "
            f"differ from the whole sample's by {apart:.1e}, more than {limit:.1e} {about}. Some layer treats a piece "
            "as a sample of its own"
        )
    # In half precision rounding may send a token to another expert, hence a share of what is certainly wrong.
    most, apart = _LIMITS.get(whole.dtype, _SHARE * alone), _apart(blocks, whole)
    if not apart <= most:
        raise UnsupportedError(
            f"samples of {name} cannot be split: its own attention and causal attention by blocks give outputs that "
            f"differ by {apart:.1e}, more than {most:.1e} {about}"
        )
    return max(split.row_bytes.values())


def _run(model: nn.Module, layers: int, extra: dict[str, Any], tokens: Tensor, rehearsal: Rehearsal) -> Tensor:
    """Output [tokens, ...] of the model for the rows of a rehearsal, in the order of the sample."""
    name, places = type(model).__name__, range(len(rehearsal.cut.slices))
    rows = torch.stack([rehearsal.cut.positions(place, tokens.device) for place in places])
    try:
        given = _output(model(input_ids=tokens[rows], position_ids=rows, odc_piece=PieceHandle(rehearsal), **extra))
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, OdcError):
            raise
        raise UnsupportedError(
            f"samples of {name} cannot be split: run with `odc_piece` it fails with {type(error).__name__}: {error}"
        ) from error
    called = sorted(rehearsal.row_bytes)
    if called != list(range(layers)):
        missing = sorted(set(range(layers)) - set(called))
        raise UnsupportedError(
            f"samples of {name} cannot be split: of its {layers} layers these did not hand their attention over: "
            f"{', '.join(map(str, missing)) or 'none'}; it was called for layers {called}"
        )
    return given.flatten(0, 1)[rows.flatten().argsort()]


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
