"""What has changed between two published versions of a shard, packed without loss for readers that have the older one.

Bytes are taken as 16-bit words, whatever their dtype. An optimizer step leaves most words of a bf16 shard as they are,
and moves nearly all others to a neighbour: by one unit in the last place. Half of an fp32 shard's words change to
anything, the halves with the exponents behave as bf16 does.

A shard is packed by tiles of 4096 words, each by itself:

    4 bytes a tile, and 4 more     where its record begins, and where the last one ends; an empty record: no change
    of a record: 64 bytes          a map of the groups of 8 words: whether one has changed
    a byte a changed group         a bit for each word; the bytes of all groups are a map of the words
    a bit a changed word           1: moved by one, 0: another value
    a bit a word moved by one      1: the next value, 0: the value before
    2 bytes each                   the other values

The bits follow each other from the low end of each byte on; the values begin on 4 bytes. In a map, bit b of byte i
stands for item 64 b + i of each block of 512. What is listed of words is in the order of the map's bits, not of the
words. So maps are made without moving a bit sideways. docs/decisions.md names the codes that were measured beside it.
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
    return int(_loops().pack(_words(old), _words(new), into.numpy()))


def patch(shard: torch.Tensor, packed: torch.Tensor) -> None:
    """Turn a shard, in place, into the version whose changes since its own are `packed`. Does not wait.

    Works without numba as well, several times slower.
    """
    words, found = _words(shard), packed.numpy()
    if available():
        _loops().patch(words, found)
        return
    starts = found[: 4 * (-(-len(words) // change_loops.TILE) + 1)].view(np.uint32).tolist()
    for tile, (start, end) in enumerate(itertools.pairwise(starts)):
        if end > start:
            _patch_tile(words[tile * change_loops.TILE :][: change_loops.TILE], found[start:end])


def _patch_tile(words: np.ndarray, record: np.ndarray) -> None:
    rows, groups = change_loops.ROW, np.zeros(change_loops.GROUPS, np.uint8)
    filled = np.flatnonzero(_unpacked(record[:rows]).reshape(rows, 8).T)
    bits_at = rows + len(filled)
    groups[filled] = record[rows:bits_at]
    places = _items()[np.flatnonzero(_unpacked(groups))]
    bits = _unpacked(record[bits_at : bits_at + 2 * change_loops.TILE // 8])
    near = bits[: len(places)].astype(bool)
    moved = near.sum()
    up = bits[len(places) : len(places) + moved]
    values_at = round_up(bits_at + -(-(len(places) + moved) // 8), 4)
    words[places[near]] += up.astype(np.uint16) * 2 - 1  # in 16 bits, with NumPy 1 as well
    words[places[~near]] = record[values_at:].view(np.uint16)[: len(places) - moved]


@cache
def _items() -> np.ndarray:
    """The words of a tile in the order of the bits of its map."""
    words = np.arange(change_loops.TILE)
    return words.reshape(-1, 8, change_loops.ROW).transpose(0, 2, 1).ravel()


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
    size = loops.pack(words, words + words.dtype.type(1), into := np.zeros(256, np.uint8))
    loops.patch(words, into[:size])
    return loops
