"""odc's Triton kernels on the emulated device: a launch returns at once, and its stream interprets it in its turn.

Triton's interpreter takes one kernel at a time, and Python's lock, so kernels of several streams do not run beside each
other; they run late, and beside whatever else streams do. As under CUDA a launch keeps no tensor alive and copies none:
the kernel gets addresses, and finds what is there when its stream comes to it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import itertools
import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from recorded.kernels import launches

from tests.support.interpreter import patch_once

_CPU = torch.device("cpu")
_Run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class LateLaunches:
    """In place of odc's `launch`, which it calls in the end: on the thread of a stream, for memory of the host.

    An error of a kernel ends the process, as a fault of a device does.
    """

    def __init__(self, cuda: ctypes.CDLL, launch: Callable[..., Any]) -> None:
        self._launch, self._interpreting = launch, threading.Lock()
        self._numbers, self._queued = itertools.count(1), dict[int, tuple[Any, ...]]()
        self._over = False  # Python is about to end, and no thread but the last may take its lock
        self._run = _Run(self._interpret)
        self._enqueue = cuda.emulated_launch
        self._enqueue.argtypes = [ctypes.c_void_p, ctypes.c_int, _Run, ctypes.c_void_p]
        self._drain_all = cuda.emulated_drain_all
        atexit.register(self._finish)
        patch_once()

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        device: torch.device,
        *args: Any,
        warps: int | None = None,
        **constants: Any,
    ) -> Any:
        """As odc's `launch`: returns what stands for the compiled kernel, on a device."""
        if device.type != "cuda":
            return self._launch(kernel, grid, device, *args, warps=warps, **constants)
        if 0 in grid:
            return None
        with torch.cuda.device(device):
            self.enqueue(kernel, grid, args, constants)
        return InterpretedAsCompiled(self, kernel, constants)

    def enqueue(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """At the end of the current stream's queue."""
        if self._over:
            return
        stream, number = torch.cuda.current_stream(), next(self._numbers)
        self._queued[number] = kernel, grid, [_seen_by_kernels(arg) for arg in args], constants
        launches(kernel)
        self._enqueue(stream.cuda_stream, stream.device_index, self._run, number)

    def _interpret(self, number: int) -> None:
        """On a stream's thread. No garbage is collected there: a finalizer may wait for the stream."""
        self._interpreting.acquire()
        collects = gc.isenabled()
        gc.disable()
        try:
            kernel, grid, args, constants = self._queued.pop(number)
            self._launch(kernel, grid, _CPU, *args, **constants)
        except BaseException:
            traceback.print_exc()
            os.abort()
        finally:
            if collects:
                gc.enable()
            self._interpreting.release()

    def _finish(self) -> None:
        self._over = True
        self._drain_all()


class InterpretedAsCompiled:
    """A kernel with its constants: what triton's `CompiledKernel` is to `PreparedLaunch`."""

    def __init__(self, launches: LateLaunches, kernel: Any, constants: dict[str, Any]) -> None:
        self._launches, self._kernel, self._constants = launches, kernel, constants

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        """The function that launches it on the current stream of the current device, with all arguments in order.

        As with triton, values for the constants change nothing. Where triton would have compiled values of the first
        arguments into the kernel, which may not hold for these, it raises TypeError.
        """
        kernel, constants = self._kernel, self._constants

        def run(*args: Any) -> None:
            given = dict(zip(kernel.arg_names, args, strict=True))
            free = {name: value for name, value in given.items() if name not in constants}
            if bound := free.keys() - set(kernel.kwargs["do_not_specialize"] or ()):
                raise TypeError(f"{kernel.__name__} is compiled for what {', '.join(sorted(bound))} were at first")
            self._launches.enqueue(kernel, grid, tuple(free.values()), constants)

        return run


def _seen_by_kernels(arg: Any) -> Any:
    """A tensor as the pointer that a kernel sees, to which triton's interpreter would otherwise copy its storage."""
    if not isinstance(arg, torch.Tensor):
        return arg
    if not arg.is_cuda:
        raise ValueError(f"a kernel on a device cannot reach a tensor on {arg.device}")
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle
    from triton.runtime.jit import mangle_type

    kind = tl.str_to_ty(mangle_type(arg), None)
    return tl.tensor(TensorHandle(np.array([arg.data_ptr()], dtype=np.uint64), kind), kind)
