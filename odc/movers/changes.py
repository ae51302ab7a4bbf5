"""What has changed between two published versions of a shard, packed without loss for readers that have the older one.

Bytes are taken as 16-bit words, whatever their dtype. An optimizer step leaves most words of a bf16 shard as they are,
and moves nearly all others to a neighbour: by one unit in the last place. Half of an fp32 shard's words change to
anything, the halves with the exponents behave as bf16 does.

A shard is packed by tiles of 4096 words, each by itself:

    4 bytes a tile, and 4 more     where its record begins, and where the last one ends; an empty record: no change
    of a record: 64 bytes          a bit for each group of 8 words: whether one has changed
    a byte a changed group         a bit for each word
    2 bits a changed word          1: the next value, 2: the value before, 0: another value
    2 bytes each                   the other values

The last two begin on 4 bytes. docs/decisions.md names the codes that were measured beside it.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import torch

from odc.compiled import compiled, numba
from odc.memory import round_up
from odc.movers import change_loops

TOO_LARGE = -1
_UNIT = 2 * change_loops.GROUP  # bytes


def available() -> bool:
    """Whether shards can be packed here: it takes numba (extra `fast`)."""
    return numba() is not None


def prepare() -> None:
    """Compile the loops, or load what was compiled before; the first use takes seconds otherwise. Needs numba."""
    _loops()


def room_for(nbytes: int) -> int:
    """Bytes for the changes of a shard of `nbytes`: three quarters of it. What does not fit there is not worth it."""
    return round_up(nbytes * 3 // 4, 64)


def pack(old: torch.Tensor, new: torch.Tensor, into: torch.Tensor) -> int:
    """Write to `into` what turns `old` into `new`, bytes on the CPU whose count is a multiple of 16.

    Returns the bytes written; 0 if nothing has changed, TOO_LARGE if they do not fit. Does not wait.
    """
    return int(_loops().pack(_words(old), _words(new), into.numpy(), *_bits()))


def patch(shard: torch.Tensor, packed: torch.Tensor) -> None:
    """Turn a shard, in place, into the version whose changes since its own are `packed`. Does not wait.

    Works without numba as well, several times slower.
    """
    words, found = _words(shard), packed.numpy()
    if available():
        _loops().patch(words, found, *_bits())
        return
    starts = found[: 4 * (-(-len(words) // change_loops.TILE) + 1)].view(np.uint32).tolist()
    for tile, (start, end) in enumerate(itertools.pairwise(starts)):
        if end > start:
            _patch_tile(words[tile * change_loops.TILE :][: change_loops.TILE], found[start:end])


def _patch_tile(words: np.ndarray, record: np.ndarray) -> None:
    tops = change_loops.TILE // change_loops.GROUP // 8
    groups = np.flatnonzero(_unpacked(record[:tops]))
    codes_at = tops + len(groups)
    which = np.flatnonzero(_unpacked(record[tops:codes_at]))
    places = groups[which // change_loops.GROUP] * change_loops.GROUP + which % change_loops.GROUP
    values_at = round_up(codes_at + -(-len(places) // 4), 4)
    codes = _unpacked(record[codes_at:values_at])[: 2 * len(places)].reshape(-1, 2)
    new = words[places] + codes[:, 0] - codes[:, 1]
    others = ~codes.any(1)
    new[others] = record[values_at:].view(np.uint16)[: others.sum()]
    words[places] = new


def _unpacked(bits: np.ndarray) -> np.ndarray:
    return np.unpackbits(bits, bitorder="little")


def _words(memory: torch.Tensor) -> np.ndarray:
    if memory.numel() % _UNIT:
        raise ValueError(f"a shard of {memory.numel()} bytes is not a multiple of {_UNIT}")
    words: np.ndarray = memory.numpy().view(np.uint16)
    return words


@cache
def _loops() -> Any:
    loops, words = compiled(change_loops), np.zeros(change_loops.GROUP, np.uint16)
    size = loops.pack(words, words + words.dtype.type(1), into := np.zeros(256, np.uint8), *_bits())
    loops.patch(words, into[:size], *_bits())
    return loops


@cache
def _bits() -> tuple[np.ndarray, np.ndarray]:
    """uint8 [256, 8]: the numbers of the bits that are set in each byte; uint8 [256]: how many they are."""
    places, counts = np.zeros((256, 8), np.uint8), np.zeros(256, np.uint8)
    for byte in range(256):
        found = [i for i in range(8) if byte >> i & 1]
        places[byte, : len(found)], counts[byte] = found, len(found)
    return places, counts
