"""FSDP2's collectives, recorded as spans, so that its arms are measured like the others.

This goes through torch's public hooks. On the processor ranks wait inside collectives. On CUDA these run on streams of
their own beside compute, so their spans are on lanes of their own, from when the rank's stream comes to a collective to
its end there; what a step loses to them is the time for which the compute stream stalls for one. FSDP2's copies into
and out of its buffers count as compute. An asynchronous gather's span holds only its start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from odc.trace import COLLECTIVE, COLLECTIVE_LANES, FETCH, MAIN, PUSH, WAIT, recorder

# torch 2.13 renamed both and warns about the old names.
_gather: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce: Final[Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_lanes: dict[Any, str] = {}  # of the streams in which collectives were called: the lane of the newest one


class _Recorded:
    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._ended = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


def _moment(category: str, tensor: Tensor) -> int:
    """Now, in the lane of `category` on the tensor's device."""
    if not tensor.is_cuda:
        return recorder().now()
    stream = torch.cuda.current_stream(tensor.device)
    _lanes[stream] = COLLECTIVE_LANES[category]
    return recorder().now_in(stream)


def _add(category: str, tensor: Tensor, start: int, unit: str) -> int:
    """A span that ends now; returns when that is."""
    end, lane = _moment(category, tensor), COLLECTIVE_LANES[category] if tensor.is_cuda else MAIN
    recorder().add(category, start, end_ns=end, unit=unit, peer=COLLECTIVE, nbytes=tensor.nbytes, lane=lane)
    return end


class RecordedAllGather(_Recorded):
    """torch's default all-gather of one unit, recorded as a FETCH span with `peer=COLLECTIVE`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        start = _moment(FETCH, output_tensor)
        work = _gather(output_tensor, input_tensor, group=group, async_op=async_op)
        _add(FETCH, output_tensor, start, self._unit)
        return work


class RecordedReduceScatter(_Recorded):
    """torch's default reduce-scatter of one unit, recorded as a PUSH span with `peer=COLLECTIVE`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        start = _moment(PUSH, input_tensor)
        work = _reduce(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        self._ended = _add(PUSH, input_tensor, start, self._unit)
        return work

    def all_reduced(self, reduced: Tensor) -> None:
        """Records, once torch has all-reduced the result over replicas, the time since the reduce-scatter as a PUSH."""
        _add(PUSH, reduced, self._ended, f"{self._unit} all-reduce")


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

    FSDP2 does so where it needs what a collective has gathered, and where it needs a collective's buffer or result. The
    `unit` of the WAIT is then the lane of the collectives of that stream, by which `split_waits` separates waiting for
    late ranks from transfer. Replaces two methods of `torch.cuda.Stream` for the process, since each call makes its own
    stream object; the recorder must be timed by the device (`DeviceClock`).
    """
    if compute is None:
        yield
        return
    streams: Any = torch.cuda.Stream
    plain_wait, plain_record = streams.wait_event, streams.record_event

    def record_event(stream: torch.cuda.Stream, event: Any = None) -> Any:
        event = plain_record(stream, event)
        event.odc_lane = _lanes.get(stream, "")
        return event

    def wait_event(stream: torch.cuda.Stream, event: Any) -> None:
        if stream != compute:
            plain_wait(stream, event)
            return
        with recorder().span(WAIT, unit=getattr(event, "odc_lane", ""), peer=COLLECTIVE):
            plain_wait(stream, event)

    streams.wait_event, streams.record_event = wait_event, record_event
    try:
        yield
    finally:
        streams.wait_event, streams.record_event = plain_wait, plain_record
