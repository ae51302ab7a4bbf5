"""Adding pushed gradients into an owner's accumulator.

Chose one accumulator per owner, at least fp32, guarded by one robust lock a unit, over a copy per source: ZeRO's memory
claim holds. Whoever adds (the owner's daemon, the owner itself for its own chunk, or with `accumulate="direct"` the
pusher) goes through `add`; the price is a lock of a few microseconds a block. Sums of fp32 then depend on the order of
arrival in their last bits; fp64 accumulators (`reproducible=True`) practically do not.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from odc.comm.space import Space
from odc.comm.units import UnitSpec

BLOCK_BYTES = 1 << 20  # a mixed-dtype add over 64 MB ran at 2 GB/s, over 1 MB at 14 to 21
PARALLEL_GRAIN = 32768  # elements; torch never splits a smaller op over threads


def accumulator_dtype(reproducible: bool) -> torch.dtype:
    """fp64 when sums must not depend on the order of arrival, else fp32: bf16 swamps over many pushes."""
    return torch.float64 if reproducible else torch.float32


def block_elements(itemsize: int) -> int:
    """Elements to add at a time, for an accumulator of `itemsize` bytes.

    With several torch threads blocks stay under torch's parallel grain: a daemon or sender thread that crossed it would
    start a second team of workers and fight the training thread for cores.
    """
    return BLOCK_BYTES // itemsize if torch.get_num_threads() == 1 else PARALLEL_GRAIN


def add(
    space: Space, owner: int, unit: UnitSpec, first: int, values: torch.Tensor, *, source: int = 0, timeout_s: float
) -> None:
    """Add `values` [n] at element `first` of the owner's accumulator of `unit`, upcasting, on any thread.

    With per-source accumulators `source` (a shard index) has its own, and no lock is needed: it is the only writer.

    Raises:
        PeerLostError: a rank died while it held the lock; the accumulator may be half-added and the job must restart.
        WaitTimeoutError: the lock was not had in `timeout_s` seconds.
    """
    target = space.accumulator(owner, unit, source)[first : first + values.numel()]
    block = block_elements(target.itemsize)
    mutex = None if space.settings.accumulate == "per_source" else space.mutex(owner, unit)
    for start in range(0, values.numel(), block):
        with mutex.held(timeout_s) if mutex else nullcontext():
            target[start : start + block].add_(values[start : start + block])
