"""Microbatches of all ranks, position by position, and what the ranks count together at each position.

Position i holds the i-th microbatch of every rank. Its counts are summed over ranks by one all-reduce, which starts
when the microbatch before it is handed out, so that its latency hides behind that one's compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

Count = float | Tensor
Counts = Count | Mapping[str, Count]


class Position(NamedTuple, Generic[T]):
    """One microbatch of this rank (nothing if it has run out of them), the counts by name summed over all ranks, and
    whether the microbatch is this rank's last.
    """

    items: tuple[T, ...]
    totals: dict[str, float]
    last: bool


def positions(
    source: Iterable[T], counts: Callable[[T], Counts], names: Sequence[str], group: dist.ProcessGroup | None
) -> Iterator[Position[T]]:
    """Yields a `Position` until no rank has a microbatch left; every rank gets equally many and iterates to the end.

    One microbatch of `source`, which may be empty, is taken before the previous is yielded. `counts` gives what one
    counts by name; a single number stands for the first of `names`, which are the same on every rank. Waits until the
    slowest rank is within one position of this one.
    """
    remaining = iter(source)
    coming = _sent(remaining, counts, names, group)
    while True:
        items, work, sums = coming
        if work is not None:
            work.wait()
        active, *totals = sums.tolist()
        if not active:
            return
        coming = _sent(remaining, counts, names, group)
        yield Position(items, dict(zip(names, totals, strict=True)), last=not coming[0])


def _sent(
    remaining: Iterator[T], counts: Callable[[T], Counts], names: Sequence[str], group: dist.ProcessGroup | None
) -> tuple[tuple[T, ...], Any, Tensor]:
    """The next microbatch and the all-reduce started for it, of [number of ranks that have one, counts]."""
    items = tuple(item for item in (next(remaining, _END),) if item is not _END)
    found = counts(items[0]) if items else 0
    given = found if isinstance(found, Mapping) else {names[0]: found}
    if unknown := given.keys() - set(names):
        raise ValueError(f"counts name {', '.join(sorted(unknown))}, but the losses are divided by {', '.join(names)}")
    values = [float(len(items)), *(given.get(name, 0) for name in names)]
    device = device_of(group)
    sums = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device).reshape(()) for value in values])
    return items, dist.all_reduce(sums, group=group, async_op=True) if dist.is_initialized() else None, sums


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where `group` reduces a tensor that belongs to no model."""
    if dist.is_initialized() and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


_END: Any = object()
