"""Ending the job everywhere: one word and its reason on every board that can be reached.

Chose that the first reason on a board stays: the ranks that fail later do so because of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from odc.comm.space import Space
from odc.comm.words import Word
from odc.errors import OdcError


def write_text(region: torch.Tensor, text: str) -> None:
    """Leave `text` in a region of bytes, zero-terminated; what does not fit is cut off."""
    raw = text.encode("utf-8", "replace")[: region.numel() - 1]
    region[: len(raw) + 1].copy_(torch.frombuffer(bytearray(raw + b"\0"), dtype=torch.uint8))


def abort(space: Space, reason: str, culprit: int, others: Sequence[int]) -> None:
    """Set ABORT with `reason` on the own board and on those of `others`; the first reason on a board stays."""
    for member in (space.geometry.me, *others):
        try:
            board = space.board(member)
        except (OdcError, OSError):
            continue  # not reachable: it learns of the end from its own daemon or at its next attach
        if not board.load(Word.ABORT):
            write_text(space.reason(member), reason)
            board.store(Word.ABORT, 1 + culprit)
