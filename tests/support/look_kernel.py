"""A kernel that waits for a word while another kernel runs, for tests on a device."""

from __future__ import annotations

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
