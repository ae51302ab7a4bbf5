"""How every kernel here is launched: compiled on a GPU's memory, interpreted on a CPU's, never one on the other's.

Kernels take addresses in int64 tables. A wrong address is a fault of the process, so launchers check their arguments,
and callers keep the memory alive until the launch is over (on a GPU: until its stream has passed it).

Triton interprets kernels that were defined with TRITON_INTERPRET set in the environment. The interpreter patches
triton's language module and is not thread-safe, and the first launch of a compiled kernel compiles it, so one lock is
held around every launch, except by a `PreparedLaunch` that is compiled. No garbage is collected meanwhile: a finalizer
may wait for a thread that waits for that lock.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from odc.errors import UnsupportedError
from odc.kernels.tile import move_tile

TILE_BYTES = 16384  # one compiled program's share; not tuned yet (docs/gpu.md)
#: Of compiled kernels. A product that is fused with a sum is not rounded between them, as the CPU's is.
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
#: Programs of a launch that runs beside compute: as few multiprocessors are taken from it at once, at most.
BESIDE_COMPUTE = 32
_LARGEST_INTERPRETED = 1 << 16  # elements; an interpreted program costs about the same whatever its share
_launching = threading.Lock()


def is_interpreted(kernel: Any) -> bool:
    """Whether launches of `kernel` run in triton's interpreter: TRITON_INTERPRET=1 was set when it was defined."""
    return isinstance(kernel, InterpretedFunction)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    *args: Any,
    warps: int | None = None,
    **constants: Any,
) -> Any:
    """Run `kernel` over `grid` on `device`, on its current stream; returns at once on a GPU, when done on the CPU.

    May be called from any thread. An empty grid launches nothing. `warps` of a compiled program are those of OPTIONS by
    default. Returns what triton has compiled, if anything. Raises UnsupportedError where compiled kernels are to work
    on CPU memory, or interpreted ones on a GPU's.
    """
    if 0 in grid:
        return None
    if is_interpreted(kernel):
        if device.type != "cpu":
            raise UnsupportedError(
                f"interpreted kernels cannot reach memory of {device}: unset TRITON_INTERPRET and start the process "
                "again"
            )
        _alone(kernel[grid], args, constants)
        return None
    if device.type == "cpu":
        refuse_compiled()
    options = OPTIONS if warps is None else {**OPTIONS, "num_warps": warps}
    with torch.cuda.device(device):
        return _alone(kernel[grid], args, {**options, **constants})


class PreparedLaunch:
    """Launches of one kernel with the same constants on one device, the second and later ones without triton's binding
    of arguments, which takes five times as long as they do.

    All other parameters of the kernel must be exempt from specialization: what is compiled then serves any of them.
    """

    def __init__(self, kernel: Any, device: torch.device, **constants: Any) -> None:
        self._kernel, self._device, self._constants = kernel, device, constants
        self._compiled: Any = None
        self._ordered: tuple[Any, ...] = ()

    def __call__(self, programs: int, *args: Any, warps: int | None = None) -> None:
        """As `launch`, over a grid of one dimension."""
        if self._compiled is None or warps is not None or not programs:
            found = launch(self._kernel, (programs,), self._device, *args, warps=warps, **self._constants)
            if found is not None and warps is None:
                self._ordered = tuple(self._constants[name] for name in self._kernel.arg_names[len(args) :])
                self._compiled = found
            return
        with torch.cuda.device(self._device):
            self._compiled[programs, 1, 1](*args, *self._ordered)


@cache
def prepared(kernel: Any, device: torch.device, **constants: Any) -> PreparedLaunch:
    """As `PreparedLaunch`, one for all that launch the kernel so: the first launch of any of them compiles it."""
    return PreparedLaunch(kernel, device, **constants)


def _alone(run: Callable[..., Any], args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """One launch at a time. The collector stays off until just before the lock is released."""
    _launching.acquire()
    collects = gc.isenabled()
    gc.disable()
    try:
        return run(*args, **constants)
    finally:
        if collects:
            gc.enable()
        _launching.release()


def refuse_compiled() -> None:
    """Raise `UnsupportedError` if kernels are compiled in this process: on CPU memory only the interpreter works."""
    if not is_interpreted(move_tile):
        raise UnsupportedError(
            "Triton kernels work on CPU memory in the interpreter only, for tests: set TRITON_INTERPRET=1 in the "
            "environment before the process starts, or keep Settings(kernels='torch')"
        )


def block_of(kernel: Any, itemsize: int, largest: int) -> int:
    """Elements for one program, a power of two.

    `itemsize` is that of the larger element type read or written, `largest` the elements of the longest contiguous run.
    """
    if is_interpreted(kernel):
        return int(min(_LARGEST_INTERPRETED, max(16, triton.next_power_of_2(largest))))
    return TILE_BYTES // itemsize


def ceil_div(n: int, size: int) -> int:
    """Blocks of `size` that hold `n` elements; triton's own cdiv takes microseconds."""
    return -(-n // size)


def contiguous(what: str, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Raise `ValueError` unless every tensor is contiguous and on `device`; `what` they are, for the message."""
    for i, tensor in enumerate(tensors):
        if tensor.device != device or not tensor.is_contiguous():
            state = "contiguous" if tensor.is_contiguous() else "not contiguous"
            raise ValueError(f"{what} {i} is {state} on {tensor.device}; it must be contiguous on {device}")


def check_table(table: torch.Tensor) -> torch.device:
    """The device of a pointer table; ValueError unless it is int64, 1-D and contiguous."""
    if table.dtype != torch.int64 or table.dim() != 1 or not table.is_contiguous():
        raise ValueError(f"a pointer table is int64 [peers] and contiguous, not {table.dtype} {tuple(table.shape)}")
    return table.device
