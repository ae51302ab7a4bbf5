"""Data moved on a CUDA device by torch and the driver's copies. Nothing here waits for the device.

Pieces from `COPY_ENGINE_BYTES` on go by the copy engine, which takes no multiprocessor from compute; all small ones
together by one kernel of torch's, because a copy each would drown in launches. docs/gpu.md says how to set the bound.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from odc.errors import OdcError
from odc.runtime.movers import cpu

COPY_ENGINE_BYTES = 32 << 20  # of one piece: its copy takes several times as long as its launch; read at each fetch
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT, in a thread that has not called CUDA's runtime yet


@cache
def _copy_function() -> ctypes._FuncPointer:
    """cuMemcpyAsync: of any device's addresses that this process has mapped."""
    function = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


def copy(target: int, source: int, nbytes: int) -> None:
    """Copy bytes between device addresses, in the current stream; OdcError with CUDA's number if the driver refuses."""
    function, stream = _copy_function(), torch.cuda.current_stream()
    code = function(target, source, nbytes, stream.cuda_stream)
    if code == _NO_CONTEXT:
        stream.query()  # any call of CUDA's runtime gives a thread its context, the driver's own calls do not
        code = function(target, source, nbytes, stream.cuda_stream)
    if code:
        raise OdcError(f"a copy of {nbytes} bytes on the device was refused: CUDA error {code}")


put, publish, add, accumulate = copy, cpu.publish, cpu.add, cpu.add


def gather(
    outs: Sequence[torch.Tensor], offsets: Sequence[int], shards: int, sources: Sequence[tuple[int, torch.Tensor]]
) -> None:
    """See `DataMover.gather`; all small pieces by one call."""
    places: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for shard, memory in sources:
        for out, offset in zip(outs, offsets, strict=True):
            nbytes = out.nbytes // shards
            if nbytes >= COPY_ENGINE_BYTES:
                copy(out.data_ptr() + shard * nbytes, memory.data_ptr() + offset, nbytes)
            elif nbytes:
                numel = out.numel() // shards
                # `.data` has a version of its own: what autograd saved in forward may be filled again for backward.
                places.append(out.data[shard * numel : (shard + 1) * numel])
                values.append(memory[offset : offset + nbytes].view(out.dtype))
    if places:
        torch._foreach_copy_(places, values)
