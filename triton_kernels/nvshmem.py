"""NVSHMEM's device calls, for peers that no pointer reaches (another host's GPUs).

Each wrapper names a symbol of NVSHMEM's device library, LLVM bitcode that triton links into the kernel. Kernels call
them in branches that a constexpr chooses, so the interpreter never sees them. NVSHMEM adds no floating-point numbers.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import core

from odc.errors import UnsupportedError, install

LIBRARY = "libnvshmem_device"
_COPY = ("int64", "int64", "int64", "int32")  # types of target, source, bytes and peer
SIGNAL_SET = tl.constexpr(9)  # nvshmemx_signal_op_t


@dataclass(frozen=True)
class Symmetric:
    """How a launch reaches peers without a pointer, whose entry in the pointer table is 0."""

    own: int  # address in NVSHMEM's heap of this rank's copy of the memory that the table's entries point to
    pes: torch.Tensor  # int32 [peers], on the launching device: NVSHMEM's number of each peer
    library: Path | None = None  # NVSHMEM's device library; by default as `device_library` finds it


def device_library(capability: int) -> Path:
    """NVSHMEM's device library in LLVM bitcode for an architecture (90 for sm_90), out of the installed wheel.

    Up to 3.7 it is one file. From 3.8 on there is one for each of several architectures, and the newest that is not
    newer than the device is taken; triton reads these from 3.7 on. Raises UnsupportedError, naming what to install.
    """
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec is not None else ():
        folder = Path(root) / "nvshmem" / "lib"
        numbers = [int(path.stem.rpartition("_")[2]) for path in folder.glob(f"{LIBRARY}_sm_*.bc")]
        if fitting := [number for number in numbers if number <= capability]:
            return folder / f"{LIBRARY}_sm_{max(fitting)}.bc"
        if (path := folder / f"{LIBRARY}.bc").exists():
            return path
    raise UnsupportedError(
        f"kernels for peers without a pointer need {LIBRARY}.bc, which CUDA builds of torch bring along "
        f"(nvidia-nvshmem); to compile without a GPU: {install('bitcode')}"
    )


def options_for(table: torch.Tensor, symmetric: Symmetric | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(runtime arguments, constants) that choose a kernel's branch: pointers only, or NVSHMEM where there is none."""
    if symmetric is None:
        return (0, table), {"NVSHMEM": False}
    if symmetric.pes.dtype != torch.int32 or symmetric.pes.shape != table.shape or symmetric.pes.device != table.device:
        raise ValueError(f"pes must be int32 [{table.numel()}] on {table.device}, one for each entry of the table")
    library = symmetric.library or device_library(_capability(table.device))
    libraries = {LIBRARY: str(library)}
    return (symmetric.own, symmetric.pes), {"NVSHMEM": True, "extern_libs": libraries}


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _call(symbol: str, args: list[Any], types: tuple[str, ...], semantic: Any, returns: str = "int32") -> Any:
    signature = {tuple(core.dtype(one) for one in types): (symbol, core.dtype(returns))}
    return core.extern_elementwise("", "", args, signature, is_pure=False, _semantic=semantic)


@triton.jit
def first_thread() -> tl.tensor:
    """True in one thread of the program alone, so for branches that hold nothing but calls of one thread.

    A scalar call is made by every thread: right for what a whole program does together (`getmem_block`), but 128
    additions where one is meant.
    """
    return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1) == 0


@core.extern
def getmem_block(target: Any, source: Any, nbytes: Any, pe: Any, _semantic: Any = None) -> Any:
    """Copy from `source` on `pe` to the local `target`, by the whole program; returns when it has arrived."""
    return _call("nvshmemx_getmem_block", [target, source, nbytes, pe], _COPY, _semantic)


@core.extern
def putmem_block(target: Any, source: Any, nbytes: Any, pe: Any, _semantic: Any = None) -> Any:
    """Copy from the local `source` to `target` on `pe`, by the whole program; has arrived after `quiet`."""
    return _call("nvshmemx_putmem_block", [target, source, nbytes, pe], _COPY, _semantic)


@core.extern
def putmem_signal_block(
    target: Any, source: Any, nbytes: Any, word: Any, value: Any, operation: Any, pe: Any, _semantic: Any = None
) -> Any:
    """As `putmem_block`, then SIGNAL_SET of `value` to `word` on `pe`, after the data has arrived."""
    types = ("int64", "int64", "int64", "int64", "int64", "int32", "int32")
    args = [target, source, nbytes, word, value, operation, pe]
    return _call("nvshmemx_putmem_signal_block", args, types, _semantic)


@core.extern
def signal_op(word: Any, value: Any, operation: Any, pe: Any, _semantic: Any = None) -> Any:
    """SIGNAL_SET of `value` to `word` on `pe`, by this thread; orders nothing by itself."""
    types = ("int64", "int64", "int32", "int32")
    return _call("nvshmemx_signal_op", [word, value, operation, pe], types, _semantic)


@core.extern
def quiet(_semantic: Any = None) -> Any:
    """Returns when all that this thread has put, and its signals, have arrived."""
    return _call("nvshmem_quiet", [], (), _semantic)
