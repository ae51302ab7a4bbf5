"""Which bytes of the ranks' shards make a parameter, or a slice of it along one dimension."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch

from odc.handover.handle import PublishedParameter


class ParameterSlice(NamedTuple):
    """The elements of a parameter whose index along dimension `dim` is in [`start`, `stop`)."""

    dim: int
    start: int
    stop: int

    def shape_of(self, one: PublishedParameter) -> tuple[int, ...]:
        return (*one.shape[: self.dim], self.stop - self.start, *one.shape[self.dim + 1 :])


class ShardPart(NamedTuple):
    """Consecutive bytes of a shard that are read at once, and where they go.

    `shard` numbers the shard, in which `nbytes` from `first` on are a tensor of `shape`. Of this tensor `taken`, (dim,
    start, length), is wanted, or all if None. It fills `length` indices from `at` on of the result, along the dimension
    in which the parameter is sharded.
    """

    shard: int
    first: int
    nbytes: int
    shape: tuple[int, ...]
    taken: tuple[int, int, int] | None
    at: int
    length: int

    def of(self, read: torch.Tensor) -> torch.Tensor:
        """What is wanted of the tensor that was read."""
        return read if self.taken is None else read.narrow(*self.taken)


def slice_of(name: str, one: PublishedParameter, given: Any) -> ParameterSlice:
    """A slice as a caller gives it, (dim, start, stop). Raises ValueError, with the name, for one that does not fit."""
    try:
        dim, start, stop = (operator.index(number) for number in given)
    except (TypeError, ValueError):
        raise ValueError(f"the slice of {name!r} must be three integers, (dim, start, stop), not {given!r}") from None
    if not 0 <= dim < len(one.shape):
        raise ValueError(f"the slice of {name!r} is along dimension {dim} of a parameter of shape {one.shape}")
    if not 0 <= start <= stop <= one.shape[dim]:
        raise ValueError(f"the slice of {name!r}, [{start}, {stop}), is not within dimension {dim} of {one.shape}")
    return whole_of(one) if stop - start == one.shape[dim] else ParameterSlice(dim, start, stop)


def whole_of(one: PublishedParameter) -> ParameterSlice:
    """All of a parameter."""
    return ParameterSlice(0, 0, one.shape[0])


def parts_of(one: PublishedParameter, shards: int, wanted: ParameterSlice) -> list[ShardPart]:
    """What to read of each of so many shards; of a shard without a wanted element, nothing.

    A shard is a contiguous tensor of the parameter's shape but for the sharded dimension. So a slice along the first
    dimension is consecutive in each shard; of a slice along another, whole shards are read.
    """
    size, along = one.shape[one.shard_dim], wanted.dim == one.shard_dim
    each = one.shard_numel // max(1, math.prod(one.shape) // max(1, size))  # indices of a shard, with padding
    found = []
    for shard in range(shards):
        begin, end = min(shard * each, size), min((shard + 1) * each, size)
        low, high = (max(begin, wanted.start), min(end, wanted.stop)) if along else (begin, end)
        start, stop = (low - begin, high - begin) if along else (wanted.start, wanted.stop)
        if low >= high or start >= stop:
            continue
        shape, first, taken = [*one.shape], 0, None
        shape[one.shard_dim] = end - begin
        if wanted.dim == 0:
            first = start * math.prod(shape[1:]) * one.torch_dtype.itemsize
            shape[0] = stop - start
        elif stop - start < shape[wanted.dim]:
            taken = (wanted.dim, start, stop - start)
        nbytes = math.prod(shape) * one.torch_dtype.itemsize
        at = low - wanted.start if along else low
        found.append(ShardPart(shard, first, nbytes, tuple(shape), taken, at, high - low))
    return found
