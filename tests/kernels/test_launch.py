"""Launching: from many threads at once, and never on memory that a kernel cannot reach."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.kernel_heaps import failures_of_threads, numbers, same_bits
from support.on_ranks import on_interpreted_ranks
from support.uninterpreted import run_uninterpreted


@on_interpreted_ranks(1)
def test_threads_take_turns_in_the_interpreter(rank: int, world: int) -> None:
    """Without the lock triton's interpreter fails as soon as two threads are in it."""
    from odc.kernels import get

    def work(seed: int) -> None:
        for i in range(6):
            source = numbers(10 * seed + i, 100, torch.float32)
            out = torch.empty(100)
            get(out, torch.tensor([source.data_ptr()]), 0, block=32)
            assert same_bits(out, source), f"round {i}: wrong numbers"

    wrong = failures_of_threads(4, work, 60)
    assert not wrong, wrong


class Cyclic:
    """Garbage that only the collector finds; its finalizer notes whether the lock of launches is held."""

    def __init__(self, notes: list[bool]) -> None:
        self.itself, self.notes = self, notes

    def __del__(self) -> None:
        from odc.kernels.launch import _launching

        self.notes.append(_launching.locked())


@on_interpreted_ranks(1)
def test_garbage_is_not_collected_within_a_launch(rank: int, world: int) -> None:
    """A finalizer may wait for a thread that waits for the interpreter: within the lock that would be for ever."""
    from triton.runtime.interpreter import InterpretedFunction

    from odc.kernels.launch import launch

    notes: list[bool] = []

    class Littering(InterpretedFunction):
        def __init__(self) -> None:
            pass

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[[], object]:
            def run() -> object:
                Cyclic(notes)
                return [[i] for i in range(100)]  # more than the threshold: the collector would come by

            return run

    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(5):
            launch(Littering(), (1,), torch.device("cpu"))
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert notes == [False] * 5, notes
    assert gc.isenabled(), "the collector was left off"


@on_interpreted_ranks(1)
def test_other_memory_is_refused(rank: int, world: int) -> None:
    from odc.errors import UnsupportedError
    from odc.kernels.get import get_kernel
    from odc.kernels.launch import TILE_BYTES, block_of, check_table, contiguous, launch

    with pytest.raises(UnsupportedError, match="interpreted kernels cannot reach memory of cuda:0"):
        launch(get_kernel, (1,), torch.device("cuda", 0))
    launch(get_kernel, (0, 3), torch.device("cuda", 0))  # nothing to launch
    with pytest.raises(ValueError, match=r"int64 \[peers\].*not torch.int64 \(2, 2\)"):
        check_table(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="thing 1 is contiguous on meta; it must be contiguous on cpu"):
        contiguous("thing", [torch.zeros(1), torch.zeros(1, device="meta")], torch.device("cpu"))
    assert [block_of(get_kernel, 4, n) for n in (0, 17, 1 << 30)] == [16, 32, 1 << 16]
    assert TILE_BYTES % 16 == 0 and TILE_BYTES & (TILE_BYTES - 1) == 0, "blocks are powers of two, of whole 16 bytes"


def test_compiled_kernels_are_compiled_once(tmp_path: Path) -> None:
    """By three threads, for any numbers and tables: a variant more is a second lost in the middle of training."""
    found, _ = run_uninterpreted("launched.py", tmp_path)
    assert found["launched"] == found["expected"] == 3 * 12 * 7
    assert found["prepared"], "a launch past triton's binding is another launch"
    assert set(found["variants"].values()) == {1}, found
