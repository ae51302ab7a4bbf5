"""patch: turns a shard in place into the version whose changes `pack` has written, tile by tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from odc.kernels.launch import PreparedLaunch
from odc.kernels.pack import GROUP, TILE, directory_bytes, tiles_in
from odc.kernels.rows import fixed_rows, row_of

# first program, byte offset of the parameter, words, the directory's entry of the first tile
_COLUMNS = tl.constexpr(4)
_GROUPS = tl.constexpr(TILE // GROUP)
_TILE, _GROUP = tl.constexpr(TILE), tl.constexpr(GROUP)


@triton.jit(do_not_specialize=["rows_at", "rows", "shard", "packed"])
def patch_kernel(rows_at: tl.tensor, rows: tl.int64, shard: tl.int64, packed: tl.int64, WORD: tl.constexpr) -> None:
    """Grid: tiles of all parameters that have such words."""
    program = tl.program_id(0)
    row = row_of(rows_at, rows, program, _COLUMNS)
    tile = program - tl.load(row)
    entry = tl.load(packed.to(tl.pointer_type(tl.int32)) + tl.load(row + 3) + tile)
    if entry > 0:
        width: tl.constexpr = WORD.primitive_bitwidth // 8
        n = tl.minimum(tl.load(row + 2) - tile * _TILE, _TILE).to(tl.int32)
        bitmap = (n + 32 * _GROUP - 1) // (32 * _GROUP)
        record = packed + entry.to(tl.int64) * 4
        group = tl.arange(0, _GROUPS)
        bits = record.to(tl.pointer_type(tl.int32)) + group // 32
        changed = (tl.load(bits, mask=group // 32 < bitmap, other=0) >> (group % 32)) & 1
        record += 4 * bitmap
        codes_at = record.to(tl.pointer_type(tl.int16)) + (tl.cumsum(changed, axis=0) - changed)
        codes = tl.load(codes_at, mask=changed != 0, other=0).to(tl.int32)
        record += 2 * tl.sum(changed, axis=0)
        code = tl.reshape((codes[:, None] >> (2 * tl.arange(0, _GROUP)[None, :])) & 3, [_TILE])
        other = (code == 3).to(tl.int32)
        values = tl.load(
            record.to(tl.pointer_type(WORD)) + (tl.cumsum(other, axis=0) - other), mask=other != 0, other=0
        ).to(tl.int32)
        # Whole pieces of 16 bytes: what follows in the last one belongs to no parameter.
        WIDE: tl.constexpr = 16 // width
        inside = tl.arange(0, _TILE) < tl.multiple_of((n + WIDE - 1) // WIDE * WIDE, WIDE)
        place = tl.multiple_of((shard + tl.load(row + 1) + tile * (_TILE * width)).to(tl.pointer_type(WORD)), 16)
        place += tl.arange(0, _TILE)
        old = tl.load(place, mask=inside, other=0).to(tl.int32)
        new = tl.where(other != 0, values, old + (code & 1) - (code >> 1))
        tl.store(place, new.to(WORD), mask=inside)


class PatchPlan:
    """Patches of a unit's shards. Kernels are compiled and loaded when it is made; any thread may call `run`.

    Args:
        params: byte offset in the shard, elements and bytes of an element of each parameter.

    Attributes:
        directory_bytes: that lie before the first record.
    """

    def __init__(self, params: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        self.directory_bytes = directory_bytes([(numel, itemsize) for _, numel, itemsize in params])
        self._launches: list[tuple[PreparedLaunch, int, tuple[torch.Tensor, int]]] = []
        for word in (tl.int16, tl.int8):
            counts: list[int] = []
            columns: list[tuple[int, ...]] = []
            entry = 0
            for offset, numel, itemsize in params:
                tiles = tiles_in(numel, itemsize)
                if (itemsize == 1) == (word is tl.int8):
                    counts.append(tiles)
                    columns.append((offset, numel * max(1, itemsize // 2), entry))
                entry += tiles
            if sum(counts):
                run = PreparedLaunch(patch_kernel, device, WORD=word)
                self._launches.append((run, sum(counts), fixed_rows(counts, columns, device)))
        nothing = torch.zeros(max(4, self.directory_bytes), dtype=torch.uint8, device=device)
        self.run(nothing, nothing)  # no tile has a record

    def run(self, shard: torch.Tensor, packed: torch.Tensor) -> None:
        """Patch `shard` by `packed`, both uint8, 1-D and contiguous, 16- and 4-byte aligned. Once: words
        that moved by one would move again.

        Does not wait: both are there in the order of the current stream. One launch for each width of words, in the
        current stream; see `launch` for errors. What is no change of just this shard's version leads anywhere.
        """
        for run, programs, rows in self._launches:
            run(programs, *rows, shard.data_ptr(), packed.data_ptr())
