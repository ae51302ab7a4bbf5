"""Ending the job everywhere: one word and its reason on every board that can be reached.

The first reason on a board stays: the ranks that fail later do so because of it.
"""

from __future__ import annotations

import contextlib

import torch

from odc.runtime.layout import Space
from odc.runtime.words import Word


def abort(space: Space, reason: str, culprit: int) -> None:
    """Set ABORT with `reason` on this rank's board and on those of the members it is attached to.

    Never raises and never attaches, which may take long: other members learn of the end from this rank's board, from
    their own daemon, or when they attach. May be called from any thread.
    """
    for member in space.geometry.members:
        with contextlib.suppress(Exception):  # closed in the meantime; the others are told all the same
            if member == space.geometry.me or space.heap.attached(member):
                board = space.board(member)
                if not board.load(Word.ABORT):
                    write_text(space.reason(member), reason)
                    board.store(Word.ABORT, 1 + culprit)


def write_text(region: torch.Tensor, text: str) -> None:
    """Leave `text` in a region of bytes for `read_text`, zero-terminated; what does not fit is cut off."""
    raw = text.encode("utf-8", "replace")[: region.numel() - 1]
    region[: len(raw) + 1].copy_(torch.frombuffer(bytearray(raw + b"\0"), dtype=torch.uint8))


def read_text(region: torch.Tensor) -> str:
    """The text that `write_text` has left in a region of bytes; empty if there is none."""
    return bytes(region.numpy().tobytes()).split(b"\0", 1)[0].decode("utf-8", "replace")


def read_reason(space: Space, member: int) -> str:
    """The text a member left with ABORT, or with LEFT; empty if there is none."""
    return read_text(space.reason(member))
