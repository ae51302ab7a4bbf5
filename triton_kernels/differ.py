"""differ: which shards are no longer what was published of them, compared in place in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from odc.kernels.dtypes import cast
from odc.kernels.rows import PAIR_COLUMNS, launch_pairs, row_of


@triton.jit(do_not_specialize=["rows_at", "rows", "found"])
def differ_kernel(
    rows_at: tl.tensor, rows: tl.int64, found: tl.tensor, TO: tl.constexpr, FROM: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Grid: blocks of all parameters."""
    program = tl.program_id(0)
    row = row_of(rows_at, rows, program, PAIR_COLUMNS)
    at = (program - tl.load(row)) * BLOCK
    source = tl.load(row + 1) + at * (FROM.primitive_bitwidth // 8)
    target = tl.load(row + 2) + at * (TO.primitive_bitwidth // 8)
    STEP: tl.constexpr = 1024 if BLOCK > 1024 else BLOCK
    count = tl.minimum(tl.load(row + 3) - at, BLOCK).to(tl.int32)
    done = count * 0
    changed = count * 0
    if (target % 16 == 0) & (source % 16 == 0):
        each = tl.arange(0, BLOCK)
        done = tl.multiple_of(count // 16 * 16, 16)
        theirs = tl.multiple_of(target.to(tl.pointer_type(TO)), 16) + each
        ours = tl.multiple_of(source.to(tl.pointer_type(FROM)), 16) + each
        changed = _changed(theirs, ours, each < done, TO)
    while done < count:
        each = done + tl.arange(0, STEP)
        theirs = target.to(tl.pointer_type(TO)) + each
        ours = source.to(tl.pointer_type(FROM)) + each
        changed += _changed(theirs, ours, each < count, TO)
        done += STEP
    if changed > 0:
        tl.store(found + tl.load(row + 4), 1)


@triton.jit
def _changed(theirs: tl.tensor, ours: tl.tensor, mask: tl.tensor, TO: tl.constexpr) -> tl.tensor:
    """1 if any two differ in a bit, else 0."""
    WORD: tl.constexpr = tl.core.get_int_dtype(TO.primitive_bitwidth, True)
    published = tl.load(theirs, mask=mask).to(WORD, bitcast=True)
    now = cast(tl.load(ours, mask=mask), TO).to(WORD, bitcast=True)
    return tl.max((mask & (published != now)).to(tl.int32), axis=0)


def differ(
    places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], found: torch.Tensor, *, block: int | None = None
) -> None:
    """Store 1 to `found[i]` if shard i, converted as `publish` converts it, differs from its place in a bit.

    No shard is copied. Does not wait. One launch for each pair of dtypes, on the current stream; see
    `launch` for threads and errors.

    Args:
        places: contiguous views of the published buffer, in compute dtype.
        shards: contiguous, of any dtype, as many elements as their places.
        found: int32, contiguous, one for each shard, on their device; the others are left as they are.
        block: elements for one program.
    """
    fits = found.dtype == torch.int32 and found.numel() >= len(places) and found.is_contiguous()
    if not fits or any(place.device != found.device for place in places[:1]):
        raise ValueError(f"what is found goes to an int32 for each place, on their device, not to {found}")
    launch_pairs(differ_kernel, places, shards, block, found)
