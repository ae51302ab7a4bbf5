"""What one program does with its share: copy, add or add atomically, between two addresses.

Chose to look at run time whether a share is whole and both addresses are 16-byte aligned, and to promise the compiler
alignment only in that branch: it moves 16 bytes an instruction wherever the data allows, and every other share (the end
of a parameter, an odd offset) is masked and moved element by element. Nothing has to be padded for it.

Addresses are int64 scalars; `FROM` and `TO` are the element types behind them, `n` the elements left to handle. The
promise is made for the pointer that the branch itself makes, never for one that both branches see.
"""

from __future__ import annotations

import triton
import triton.language as tl

from odc.kernels.dtypes import cast


@triton.jit
def copy_tile(
    target: tl.tensor, source: tl.tensor, n: tl.tensor, TO: tl.constexpr, FROM: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Copy min(n, BLOCK) elements, converting."""
    at = tl.arange(0, BLOCK)
    if ((target | source) % 16 == 0) & (n >= BLOCK):
        read = tl.multiple_of(source.to(tl.pointer_type(FROM)), 16)
        write = tl.multiple_of(target.to(tl.pointer_type(TO)), 16)
        tl.store(write + at, cast(tl.load(read + at), TO))
    else:
        read = source.to(tl.pointer_type(FROM))
        write = target.to(tl.pointer_type(TO))
        tl.store(write + at, cast(tl.load(read + at, mask=at < n), TO), mask=at < n)


@triton.jit
def add_tile(
    target: tl.tensor, source: tl.tensor, n: tl.tensor, TO: tl.constexpr, FROM: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Add min(n, BLOCK) elements, converting; nobody else may write to `target` meanwhile."""
    at = tl.arange(0, BLOCK)
    if ((target | source) % 16 == 0) & (n >= BLOCK):
        read = tl.multiple_of(source.to(tl.pointer_type(FROM)), 16)
        write = tl.multiple_of(target.to(tl.pointer_type(TO)), 16)
        tl.store(write + at, tl.load(write + at) + cast(tl.load(read + at), TO))
    else:
        read = source.to(tl.pointer_type(FROM))
        write = target.to(tl.pointer_type(TO))
        sums = tl.load(write + at, mask=at < n) + cast(tl.load(read + at, mask=at < n), TO)
        tl.store(write + at, sums, mask=at < n)


@triton.jit
def atomic_add_tile(
    target: tl.tensor, source: tl.tensor, n: tl.tensor, TO: tl.constexpr, FROM: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Add min(n, BLOCK) elements, converting; each addition is one atomic operation of the whole system."""
    at = tl.arange(0, BLOCK)
    if ((target | source) % 16 == 0) & (n >= BLOCK):
        read = tl.multiple_of(source.to(tl.pointer_type(FROM)), 16)
        write = tl.multiple_of(target.to(tl.pointer_type(TO)), 16)
        tl.atomic_add(write + at, cast(tl.load(read + at), TO), sem="relaxed", scope="sys")
    else:
        read = source.to(tl.pointer_type(FROM))
        write = target.to(tl.pointer_type(TO))
        values = cast(tl.load(read + at, mask=at < n), TO)
        tl.atomic_add(write + at, values, mask=at < n, sem="relaxed", scope="sys")
