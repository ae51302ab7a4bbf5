"""Copies and zeros by CUDA's driver, at any device addresses that this process has mapped. Nothing here waits.

The copy engine does them, which takes no multiprocessor from compute. Many copies are one call where the driver has
`cuMemcpyBatchAsync` (CUDA 12.8 and newer); elsewhere they are asked for one by one.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from functools import cache

import numpy as np
import torch

from odc.errors import OdcError
from odc.memory.driver_calls import NO_CONTEXT, DriverError, call

_STREAM_ORDER, _OVERLAP_COMPUTE = 1, 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_size = ctypes.c_size_t
_log = logging.getLogger(__name__)


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes; the locations matter for managed memory only."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


@cache
def _batch_function() -> ctypes._FuncPointer | None:
    """`cuMemcpyBatchAsync` as of CUDA 12.8, which later drivers keep under this name; None where there is none.

    By ctypes, which takes addresses of whole arrays: `cuda.bindings` takes lists of objects, and 1.6 us longer for 24
    copies, 9 us for 84 (a layer's 12 parameters of 7 peers; over the emulated driver).
    """
    function = getattr(ctypes.CDLL("libcuda.so.1"), "cuMemcpyBatchAsync", None)
    if function is not None:
        pointer = ctypes.c_void_p
        function.argtypes = [pointer, pointer, pointer, _size, pointer, pointer, _size, pointer, pointer]
        function.restype = ctypes.c_int
    return function


def copy(target: int, source: int, nbytes: int) -> None:
    """Copy bytes in the current stream; OdcError with CUDA's number if the driver refuses."""
    try:
        call("cuMemcpyAsync", target, source, nbytes, torch.cuda.current_stream().cuda_stream)
    except DriverError as error:
        raise OdcError(f"a copy of {nbytes} bytes on the device was refused: {error}") from error


def zero(tensors: Iterable[torch.Tensor]) -> None:
    """Fill contiguous tensors of four-byte or wider elements with zeros in the current stream of the device of each,
    which need not be the current device; raises as `copy`.
    """
    for tensor in tensors:
        if nbytes := tensor.nbytes:
            try:
                with torch.cuda.device_of(tensor):
                    stream = torch.cuda.current_stream().cuda_stream
                    call("cuMemsetD32Async", tensor.data_ptr(), 0, nbytes // 4, stream)
            except DriverError as error:
                raise OdcError(f"zeroing {nbytes} bytes on the device was refused: {error}") from error


def copy_all(targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
    """Copy `sizes[i]` bytes from `sources[i]` to `targets[i]` for every i, in any order, in the current stream.

    All int64, 1-D, contiguous, of one length; no size is 0. Raises OdcError if the driver refuses.
    """
    if len(sizes) and not (len(sizes) > 1 and _in_one_call(targets, sources, sizes)):
        for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            copy(target, source, nbytes)


_refused: list[int] = []  # by the driver: a batch, which is not tried again
# Attributes, the first copy that they hold for, how many there are of them, and where the driver reports what failed.
_attributes, _first, _failed = _Attributes(order=_STREAM_ORDER, flags=_OVERLAP_COMPUTE), _size(0), _size(0)
_BATCH = ctypes.addressof(_attributes), ctypes.addressof(_first), 1, ctypes.addressof(_failed)


def _in_one_call(targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> bool:
    """Whether the driver took the whole batch. What it copied of one that it refused is copied again."""
    function, stream = _batch_function(), torch.cuda.current_stream()
    if function is None or _refused or not stream.cuda_stream:  # the default stream takes no batches
        return False
    arrays = targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data
    rest = *_BATCH, stream.cuda_stream
    code = function(*arrays, len(sizes), *rest)
    if code == NO_CONTEXT:
        stream.query()
        code = function(*arrays, len(sizes), *rest)
    if code:
        _refused.append(code)
        _log.warning("CUDA's driver refuses copies in one call (CUDA error %d): they are asked for one by one", code)
    return not code
