"""What triton's interpreter reads and writes while it runs a kernel in its stream's turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from recorded.notes import ATOMIC, READ, WRITE, library, wrapped

_here = threading.local()


def launches(kernel: Any) -> None:
    """The calling thread is about to enqueue a kernel, whose accesses are noted as its stream interprets it."""
    if library() is not None:
        _here.name = str(kernel.__name__).encode()  # kept alive until it is enqueued
        library().emulated_touches_as_it_runs(_here.name)


def accessed(addresses: np.ndarray, mask: np.ndarray, width: int, mode: int) -> None:
    """The kernel that runs on this thread accesses `width` bytes at each of these addresses that is not masked."""
    starts = addresses[np.broadcast_to(mask, addresses.shape)].ravel().astype(np.uint64)
    if not len(starts):
        return
    gaps = np.flatnonzero(np.diff(starts) != width) + 1
    if len(gaps) > 8:
        starts = np.unique(starts)
        gaps = np.flatnonzero(np.diff(starts) != width) + 1
    edges = np.concatenate([[0], gaps, [len(starts)]])
    first, sizes = np.ascontiguousarray(starts[edges[:-1]]), (np.diff(edges) * width).astype(np.uint64)
    library().emulated_accessed(first.ctypes.data, sizes.ctypes.data, len(first), mode)


def interpreter(module: ModuleType) -> None:
    """Loads, stores and atomic additions."""

    def masked(mode: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(real: Callable[..., Any]) -> Callable[..., Any]:
            def run(self: Any, pointers: Any, second: Any, third: Any, *rest: Any) -> Any:
                mask = second if mode == READ else third  # load(pointers, mask, ...), store(pointers, value, mask)
                width = np.dtype(module._get_np_dtype(pointers.get_element_ty())).itemsize
                accessed(pointers.data, mask.data, width, mode)
                return real(self, pointers, second, third, *rest)

            return run

        return around

    def update(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            accessed(pointers.data, mask.data, value.data.dtype.itemsize, ATOMIC)
            return real(self, operation, pointers, value, mask, *rest)

        return run

    wrapped(module.InterpreterBuilder, "create_masked_load", masked(READ))
    wrapped(module.InterpreterBuilder, "create_masked_store", masked(WRITE))
    wrapped(module.InterpreterBuilder, "create_atomic_rmw", update)
