"""Ending the job everywhere: one word and its reason on every board that can be reached.

Chose that the first reason on a board stays: the ranks that fail later do so because of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from odc.comm.space import REASON_BYTES, Space
from odc.comm.words import Word
from odc.errors import OdcError


def abort(space: Space, reason: str, culprit: int, others: Sequence[int]) -> None:
    """Set ABORT with `reason` on the own board and on those of `others`; the first reason on a board stays."""
    raw = reason.encode("utf-8", "replace")[: REASON_BYTES - 1]
    text = torch.frombuffer(bytearray(raw + b"\0"), dtype=torch.uint8)
    for member in (space.geometry.me, *others):
        try:
            board = space.board(member)
        except (OdcError, OSError):
            continue  # not reachable: it learns of the end from its own daemon or at its next attach
        if not board.load(Word.ABORT):
            space.reason(member)[: text.numel()].copy_(text)
            board.store(Word.ABORT, 1 + culprit)
