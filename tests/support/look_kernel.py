"""Kernels that wait for a word while another kernel runs, for tests on a device."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["word", "target", "looks", "seen"])
def _look_kernel(word: tl.tensor, target: tl.int64, looks: tl.int64, seen: tl.tensor) -> None:
    value = target.to(tl.int64) - 1
    while (value < target) & (looks > 0):
        value = tl.atomic_add(word, target * 0, sem="acquire", scope="sys")
        looks -= 1
    tl.store(seen, value)


def look(word: torch.Tensor, target: int, seen: torch.Tensor, *, looks: int) -> None:
    """Read `word` (int64 [1]) with acquire until it is at least `target`, at most `looks` times.

    One launch on the current stream, not waited for; `seen` (int64 [1]) takes the value of the last look.
    """
    with torch.cuda.device(word.device):
        _look_kernel[(1,)](word, target, looks, seen)


@triton.jit(do_not_specialize=["word", "target", "looks", "slot", "n", "seen"])
def _look_and_read_kernel(
    word: tl.tensor,
    target: tl.int64,
    looks: tl.int64,
    slot: tl.tensor,
    n: tl.int64,
    seen: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    value = target.to(tl.int64) - 1
    while (value < target) & (looks > 0):
        value = tl.atomic_add(word, target * 0, sem="acquire", scope="sys")
        looks -= 1
    late = (target * 0).to(tl.int32)
    for block in tl.static_range(BLOCKS):
        at = n - (block + 1) * BLOCK + tl.arange(0, BLOCK)
        found = tl.load(slot + at, mask=at >= 0, other=target.to(tl.int32))
        late += tl.sum((found != target.to(tl.int32)).to(tl.int32), axis=0)
    tl.store(seen, value)
    tl.store(seen + 1, late.to(tl.int64))


def look_and_read(word: torch.Tensor, target: int, slot: torch.Tensor, seen: torch.Tensor, *, looks: int) -> None:
    """As `look`, and at once, in the same kernel, read the last 16,384 elements of `slot` (int32), from the end.

    `seen` (int64 [2]) takes the word's value and how many of those elements were not `target` yet.
    """
    with torch.cuda.device(word.device) if word.is_cuda else nullcontext():
        _look_and_read_kernel[(1,)](word, target, looks, slot, slot.numel(), seen, BLOCK=1024, BLOCKS=16)
