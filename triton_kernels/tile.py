"""What one program does with its share: copy, add or add atomically, between two addresses.

Alignment is checked at run time and promised to the compiler only in that branch, which moves 16 bytes an instruction.
The up to 15 elements left over, and shares at unaligned addresses, go element by element in a loop (unrolled, it would
make the aligned branch spill registers). Addresses are int64 scalars, `FROM` and `TO` the element types behind them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from odc.kernels.dtypes import cast


@triton.jit
def move_tile(
    target: tl.tensor,
    source: tl.tensor,
    n: tl.tensor,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    BLOCK: tl.constexpr,
    HOW: tl.constexpr,
) -> None:
    """Move min(n, BLOCK) elements, converting.

    `HOW`: "copy"; "add", while nobody else may write to `target`; "atomic", each addition atomic at system scope.
    """
    WIDE: tl.constexpr = TO.primitive_bitwidth > FROM.primitive_bitwidth
    # No instruction adds two fp64.
    WRITE: tl.constexpr = 8 if HOW == "atomic" and TO.primitive_bitwidth == 64 else 16
    # A thread reads the elements that it writes; otherwise they would change threads through shared memory.
    READ: tl.constexpr = WRITE * FROM.primitive_bitwidth // TO.primitive_bitwidth if WIDE else WRITE
    STEP: tl.constexpr = 1024 if BLOCK > 1024 else BLOCK
    count = tl.minimum(n, BLOCK).to(tl.int32)
    done = count * 0
    if (target % WRITE == 0) & (source % READ == 0):
        at = tl.arange(0, BLOCK)
        write = tl.multiple_of(target.to(tl.pointer_type(TO)), WRITE) + at
        read = tl.multiple_of(source.to(tl.pointer_type(FROM)), READ) + at
        done = tl.multiple_of(count // 16 * 16, 16)
        _move(write, read, at < done, TO, HOW)
    while done < count:
        each = done + tl.arange(0, STEP)
        write = target.to(tl.pointer_type(TO)) + each
        read = source.to(tl.pointer_type(FROM)) + each
        _move(write, read, each < count, TO, HOW)
        done += STEP


@triton.jit
def _move(write: tl.tensor, read: tl.tensor, mask: tl.tensor, TO: tl.constexpr, HOW: tl.constexpr) -> None:
    values = cast(tl.load(read, mask=mask), TO)
    if HOW == "copy":
        tl.store(write, values, mask=mask)
    elif HOW == "add":
        tl.store(write, tl.load(write, mask=mask) + values, mask=mask)
    else:
        tl.static_assert(HOW == "atomic")
        tl.atomic_add(write, values, mask=mask, sem="relaxed", scope="sys")
