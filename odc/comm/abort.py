"""Ending the job everywhere: one word and its reason on every board that can be reached.

The first reason on a board stays: the ranks that fail later do so because of it.
"""

from __future__ import annotations

import contextlib

import torch

from odc.comm.space import REASON_BYTES, Space
from odc.comm.words import Word


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
                    write_reason(space, member, reason)
                    board.store(Word.ABORT, 1 + culprit)


def write_reason(space: Space, member: int, reason: str) -> None:
    """Have `read_reason` of `member` return `reason`, cut to what there is room for."""
    raw = reason.encode("utf-8", "replace")[: REASON_BYTES - 1]
    text = torch.frombuffer(bytearray(raw + b"\0"), dtype=torch.uint8)
    space.reason(member)[: text.numel()].copy_(text)


def read_reason(space: Space, member: int) -> str:
    """The text a member left with ABORT, or with LEFT; empty if there is none."""
    raw = bytes(space.reason(member).numpy().tobytes())
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")
