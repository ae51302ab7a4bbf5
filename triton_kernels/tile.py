"""What one program does with its share: copy or add atomically from one address to another, add from several, zero.

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

    `HOW`: "copy"; "add", while no other program may write to `target`; "atomic", each addition atomic at system scope.
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


@triton.jit
def add_tile(
    target: tl.tensor,
    sources: tl.tensor,
    sources_count: tl.tensor,
    at: tl.tensor,
    n: tl.tensor,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add min(n, BLOCK) elements of each source, from element `at` on, to `target`; no other program may write to it.

    `sources` points to their `sources_count` addresses.
    """
    WIDE: tl.constexpr = TO.primitive_bitwidth > FROM.primitive_bitwidth
    READ: tl.constexpr = 16 * FROM.primitive_bitwidth // TO.primitive_bitwidth if WIDE else 16
    STEP: tl.constexpr = 1024 if BLOCK > 1024 else BLOCK
    count = tl.minimum(n, BLOCK).to(tl.int32)
    skip = at * (FROM.primitive_bitwidth // 8)
    askew = target % 16
    i = sources_count * 0
    while i < sources_count:
        askew += (tl.load(sources + i) + skip) % READ
        i += 1
    done = count * 0
    if askew == 0:
        each = tl.arange(0, BLOCK)
        done = tl.multiple_of(count // 16 * 16, 16)
        write = tl.multiple_of(target.to(tl.pointer_type(TO)), 16) + each
        total = tl.load(write, mask=each < done)
        i = sources_count * 0
        while i < sources_count:
            read = tl.multiple_of((tl.load(sources + i) + skip).to(tl.pointer_type(FROM)), READ) + each
            total += cast(tl.load(read, mask=each < done), TO)
            i += 1
        tl.store(write, total, mask=each < done)
    while done < count:
        each = done + tl.arange(0, STEP)
        write = target.to(tl.pointer_type(TO)) + each
        total = tl.load(write, mask=each < count)
        i = sources_count * 0
        while i < sources_count:
            read = (tl.load(sources + i) + skip).to(tl.pointer_type(FROM)) + each
            total += cast(tl.load(read, mask=each < count), TO)
            i += 1
        tl.store(write, total, mask=each < count)
        done += STEP


@triton.jit
def zero_tile(target: tl.tensor, start: tl.tensor, end: tl.tensor, TO: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Zero elements from `start` (0 if below) up to min(end, BLOCK)."""
    STEP: tl.constexpr = 1024 if BLOCK > 1024 else BLOCK
    done = tl.minimum(tl.maximum(start, 0), BLOCK).to(tl.int32)
    last = tl.minimum(end, BLOCK).to(tl.int32)
    while done < last:
        each = done + tl.arange(0, STEP)
        tl.store(target.to(tl.pointer_type(TO)) + each, tl.zeros([STEP], dtype=TO), mask=each < last)
        done += STEP
