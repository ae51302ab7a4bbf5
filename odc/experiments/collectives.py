"""FSDP2's collectives, recorded as spans, so that its arms are measured like the others.

On the processor, whose ranks wait inside them, this goes through torch's public hooks. On CUDA collectives run on
streams of their own beside compute; what a step loses to them is the time for which the compute stream waits for one.
FSDP2's copies into and out of its buffers count as compute. An asynchronous gather's span holds only its start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from odc.trace import COLLECTIVE, FETCH, PUSH, WAIT, recorder

# torch 2.13 renamed both and warns about the old names.
_gather: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce: Final[Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Recorded:
    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._ended = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class RecordedAllGather(_Recorded):
    """torch's default all-gather of one unit, recorded as a FETCH span with `peer=COLLECTIVE`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        start = recorder().now()
        work = _gather(output_tensor, input_tensor, group=group, async_op=async_op)
        recorder().add(FETCH, start, unit=self._unit, peer=COLLECTIVE, nbytes=output_tensor.nbytes)
        return work


class RecordedReduceScatter(_Recorded):
    """torch's default reduce-scatter of one unit, recorded as a PUSH span with `peer=COLLECTIVE`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        start = recorder().now()
        work = _reduce(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        recorder().add(PUSH, start, unit=self._unit, peer=COLLECTIVE, nbytes=input_tensor.nbytes)
        self._ended = recorder().now()
        return work

    def all_reduced(self, reduced: Tensor) -> None:
        """Records, once torch has all-reduced the result over replicas, the time since the reduce-scatter as a PUSH."""
        recorder().add(PUSH, self._ended, unit=f"{self._unit} all-reduce", peer=COLLECTIVE, nbytes=reduced.nbytes)


def record_collectives(model: nn.Module, *, replicated: bool = False) -> None:
    """Records the collectives of every unit that torch's `fully_shard` sharded, under the unit's name.

    `replicated`: the mesh has two dimensions, so that gradients are all-reduced as well.
    """
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            reduce_scatter = RecordedReduceScatter(name)
            module.set_custom_all_gather(RecordedAllGather(name))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]
            if replicated:
                module.set_all_reduce_hook(reduce_scatter.all_reduced)


@contextmanager
def recorded_stalls(compute: torch.cuda.Stream | None) -> Iterator[None]:
    """Records as a WAIT every time the stream `compute` is made to wait for another stream's event; None records none.

    FSDP2 does so where it needs what a collective has gathered, and where it needs a collective's buffer or result.
    Waiting for late ranks and transfer are not told apart. Replaces `torch.cuda.Stream.wait_event` for the process,
    since each call makes its own stream object; the recorder must be timed by the device (`DeviceClock`).
    """
    if compute is None:
        yield
        return
    plain = torch.cuda.Stream.wait_event

    def wait_event(stream: torch.cuda.Stream, event: Any) -> None:
        if stream != compute:
            plain(stream, event)
            return
        with recorder().span(WAIT, peer=COLLECTIVE):
            plain(stream, event)

    torch.cuda.Stream.wait_event = wait_event  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.cuda.Stream.wait_event = plain  # type: ignore[method-assign]
