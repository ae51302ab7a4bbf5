"""pack: publishes shards, and packs what has changed of each unit since the version before, in the same launch.

What has changed is written losslessly and by tiles, each by one program, for `patch` on other hosts. Bytes are taken as
words of 16 bits, or of 8 where elements are as small. A tile is `TILE` words of one parameter. In units of 4 bytes:

    1 a tile of the unit            where its record begins, counted from here; 0: no change
    of a record: a bit a group      whether one of its 8 words has changed, for the groups that the tile has
    2 bytes a changed group         2 bits a word: 0 the same, 1 the next value, 2 the value before, 3 another value
    a word each                     the other values

Programs that find a change take their record's place by an atomic addition, so records lie in any order. A program
needs two prefix sums, and there is no second pass. The format for CPUs (`odc.movers.changes`) is denser, by a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from odc.errors import UnsupportedError
from odc.kernels.dtypes import cast, kernel_dtype, word_dtype
from odc.kernels.launch import PreparedLaunch, ceil_div, contiguous, prepared
from odc.kernels.rows import row_numbers, row_of
from odc.kernels.tables import passing_table

TILE = 2048  # words; the format, so it is the same for interpreted kernels
GROUP = 8  # words

# first program, source, target, version before, elements, number of the unit, where changes go, the directory's entry
# of the first tile, entries of the directory, 4-byte words that fit
_COLUMNS = tl.constexpr(10)
_GROUPS = tl.constexpr(TILE // GROUP)
_TILE, _GROUP = tl.constexpr(TILE), tl.constexpr(GROUP)


@triton.jit(do_not_specialize=["rows_at", "rows", "found"])
def pack_kernel(
    rows_at: tl.tensor, rows: tl.int64, found: tl.tensor, TO: tl.constexpr, FROM: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Grid: tiles of all parameters, of BLOCK elements each."""
    program = tl.program_id(0)
    row = row_of(rows_at, rows, program, _COLUMNS)
    tile = program - tl.load(row)
    at = tile * BLOCK
    n = tl.minimum(tl.load(row + 4) - at, BLOCK).to(tl.int32)
    each = tl.arange(0, BLOCK)
    WIDE: tl.constexpr = 128 // TO.primitive_bitwidth  # elements that are moved at once
    whole = tl.multiple_of(
        (n + WIDE - 1) // WIDE * WIDE, WIDE
    )  # up to the next parameter, over zeros that no rank reads
    new = _converted(tl.load(row + 1) + at * (FROM.primitive_bitwidth // 8), n, TO, FROM, BLOCK)
    before = tl.multiple_of((tl.load(row + 3) + at * (TO.primitive_bitwidth // 8)).to(tl.pointer_type(TO)), 16) + each
    old = tl.load(before, mask=each < whole, other=0)
    place = tl.multiple_of((tl.load(row + 2) + at * (TO.primitive_bitwidth // 8)).to(tl.pointer_type(TO)), 16) + each
    tl.store(place, new, mask=each < whole)

    now = words_of(new, TO, BLOCK)
    last: tl.constexpr = 0xFF if TO.primitive_bitwidth == 8 else 0xFFFF
    words = words_in(n, TO)
    step = tl.where(tl.arange(0, _TILE) < words, (now - words_of(old, TO, BLOCK)) & last, 0)
    other = ((step != 0) & (step != 1) & (step != last)).to(tl.int32)
    code = (step == 1).to(tl.int32) + (step == last).to(tl.int32) * 2 + other * 3
    place_of_code = 2 * tl.arange(0, _GROUP)[None, :]
    codes = tl.sum(tl.reshape(code, [_GROUPS, _GROUP]) << place_of_code, axis=1)
    changed = (codes != 0).to(tl.int32)
    groups = tl.sum(changed, axis=0)
    others = tl.sum(other, axis=0)

    bitmap = (words + 32 * _GROUP - 1) // (32 * _GROUP)
    width: tl.constexpr = 1 if TO.primitive_bitwidth == 8 else 2  # bytes of a word
    size = bitmap + (2 * groups + width * others + 3) // 4
    entry = size * 0
    packed = tl.load(row + 6)
    if groups > 0:
        entry = tl.load(row + 8).to(tl.int32) + tl.atomic_add(found + tl.load(row + 5), size, sem="relaxed")
        if entry + size > tl.load(row + 9):
            entry = size * 0
    tl.store(packed.to(tl.pointer_type(tl.int32)) + tl.load(row + 7) + tile, entry)
    if entry > 0:
        record = packed + entry.to(tl.int64) * 4
        bits = tl.sum(tl.reshape(changed, [_GROUPS // 32, 32]) << tl.arange(0, 32)[None, :], axis=1)
        number = tl.arange(0, _GROUPS // 32)
        tl.store(record.to(tl.pointer_type(tl.int32)) + number, bits, mask=number < bitmap)
        record += 4 * bitmap
        codes_at = record.to(tl.pointer_type(tl.int16)) + (tl.cumsum(changed, axis=0) - changed)
        tl.store(codes_at, codes.to(tl.int16), mask=changed != 0)
        record += 2 * groups
        WORD: tl.constexpr = tl.int8 if TO.primitive_bitwidth == 8 else tl.int16
        values_at = record.to(tl.pointer_type(WORD)) + (tl.cumsum(other, axis=0) - other)
        tl.store(values_at, now.to(WORD), mask=other != 0)


@triton.jit
def _converted(source: tl.tensor, n: tl.tensor, TO: tl.constexpr, FROM: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """`n` elements of a shard, and zeros up to BLOCK."""
    each = tl.arange(0, BLOCK)
    if source % 16 == 0:
        done = tl.multiple_of(n // 16 * 16, 16)
        read = tl.multiple_of(source.to(tl.pointer_type(FROM)), 16) + each
        values = tl.load(read, mask=each < done, other=0)
        if done < n:
            values = tl.where(each < done, values, tl.load(read, mask=(each >= done) & (each < n), other=0))
    else:
        values = tl.load(source.to(tl.pointer_type(FROM)) + each, mask=each < n, other=0)
    return cast(values, TO)


@triton.jit
def words_in(n: tl.tensor, TO: tl.constexpr) -> tl.tensor:
    """Words of `n` elements."""
    if TO.primitive_bitwidth > 16:
        return n * (TO.primitive_bitwidth // 16)
    else:
        return n


@triton.jit
def words_of(values: tl.tensor, TO: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """int32 [words]: the words of elements, in the order of memory."""
    INT: tl.constexpr = tl.core.get_int_dtype(TO.primitive_bitwidth, True)
    bits = values.to(INT, bitcast=True)
    if TO.primitive_bitwidth == 8:
        return bits.to(tl.int32) & 0xFF
    elif TO.primitive_bitwidth == 16:
        return bits.to(tl.int32) & 0xFFFF
    elif TO.primitive_bitwidth == 32:
        return tl.reshape(tl.join(bits & 0xFFFF, (bits >> 16) & 0xFFFF), [2 * BLOCK])
    else:
        tl.static_assert(TO.primitive_bitwidth == 64)
        low, high = bits.to(tl.int32), (bits >> 32).to(tl.int32)
        even = tl.join(low & 0xFFFF, high & 0xFFFF)
        odd = tl.join((low >> 16) & 0xFFFF, (high >> 16) & 0xFFFF)
        return tl.reshape(tl.join(even, odd), [4 * BLOCK])


class UnitChanges(NamedTuple):
    """What `pack` takes of a unit: by parameter where its shard is published, the version before (perhaps in the same
    place), and the shard; then the memory for the changes, uint8 at 4 bytes, whose length is the limit.
    """

    places: Sequence[torch.Tensor]
    before: Sequence[torch.Tensor]
    shards: Sequence[torch.Tensor]
    into: torch.Tensor


def pack(units: Sequence[UnitChanges], found: torch.Tensor) -> None:
    """Publish all shards as `publish` does, and add to `found[i]` the 4-byte words of the records of unit i.

    With `directory_bytes` before them they are in `into` where they fit; else the number is beyond that, and `into`
    holds anything. Nothing was added: no bit of the unit has changed.

    Does not wait: the caller has seen that no other host still reads the changes, and no peer the places. One launch
    for each pair of dtypes, on the current stream; see `launch` for threads and errors.

    Args:
        units: places are contiguous, in compute dtype, at 16 bytes, with zeros up to the next 16.
        found: int32, contiguous, zeros, one for each unit, on their device.
    """
    if found.dtype != torch.int32 or found.numel() < len(units) or not found.is_contiguous():
        raise ValueError(f"sizes go to an int32 for each unit, not to {found}")
    pieces: list[_Piece] = []
    for number, (places, before, shards, into) in enumerate(units):
        for kind, tensors in (("place", places), ("version before", before), ("shard", shards), ("changes", [into])):
            contiguous(kind, tensors, found.device)
        directory, entry = directory_bytes([(place.numel(), place.itemsize) for place in places]) // 4, 0
        room = into.numel() // 4
        for place, old, shard in zip(places, before, shards, strict=True):
            if not place.numel() == old.numel() == shard.numel() or old.dtype != place.dtype:
                raise ValueError(f"a shard of {shard.numel()} elements does not fit a place of {place.numel()}")
            addresses = shard.data_ptr(), place.data_ptr(), old.data_ptr()
            columns = (*addresses, shard.numel(), number, into.data_ptr(), entry, directory, room)
            pieces.append((columns, shard.dtype, place.dtype))
            entry += tiles_in(place.numel(), place.itemsize)
    for run, programs, numbers, rows in _launches(found.device, tuple(pieces)):
        run(programs, passing_table(numbers, found.device), rows, found)


_Piece = tuple[tuple[int, ...], torch.dtype, torch.dtype]  # columns of its row, dtypes of the shard and of its place


@lru_cache(maxsize=64)
def _launches(
    device: torch.device, pieces: tuple[_Piece, ...]
) -> list[tuple[PreparedLaunch, int, tuple[int, ...], int]]:
    """(launch, programs, numbers of the table, rows) for each pair of dtypes."""
    pairs: dict[tuple[torch.dtype, torch.dtype], list[tuple[int, ...]]] = {}
    for columns, source, to in pieces:
        if source == to:  # copied as integers, whatever they are
            if to.itemsize > 8:
                raise UnsupportedError(f"changes are packed of numbers of 8 bytes at most, not of {to}")
            source = to = word_dtype([to])
        pairs.setdefault((to, source), []).append(columns)
    found = []
    for (to, source), rows in pairs.items():
        programs = [tiles_in(columns[3], to.itemsize) for columns in rows]
        size = elements_of_tile(to.itemsize)
        run = prepared(pack_kernel, device, TO=kernel_dtype(to), FROM=kernel_dtype(source), BLOCK=size)
        found.append((run, sum(programs), *row_numbers(programs, rows)))
    return found


def elements_of_tile(itemsize: int) -> int:
    """Elements of so many bytes in a tile."""
    return TILE // max(1, itemsize // 2)


def tiles_in(numel: int, itemsize: int) -> int:
    """Tiles of a parameter."""
    return ceil_div(numel, elements_of_tile(itemsize))


def directory_bytes(params: Sequence[tuple[int, int]]) -> int:
    """Bytes before the records of a unit; of each parameter elements and bytes of one."""
    return 4 * sum(tiles_in(numel, itemsize) for numel, itemsize in params)
