"""NVSHMEM in this process: its start, its host calls, and the one piece of its memory that odc takes, the slab.

It is loaded on first use (extra `nvshmem`) and started once in each process for the whole job (`odc.runtime.nvshmem`);
its rank numbers ("PEs") are global ranks. Of its Python package odc uses the start, the end, and the bindings: what
lies above these keeps account of allocations and knows no address inside one.

The library's own rules: host calls go one at a time, whatever the thread. Starting, allocating and ending are
collectives of the whole job without a deadline, and a failure of a host call ends the process with `exit(-1)`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from odc.errors import HeapMemoryError, UnsupportedError, install
from odc.memory.driver_memory import AtAddress
from odc.memory.layout import round_up

_MIB, _GIB = 1 << 20, 1 << 30
_GRANULARITY, _MOST = "NVSHMEM_CUMEM_GRANULARITY", "NVSHMEM_MAX_MEMORY_PER_GPU"
_STATIC, _STATIC_BYTES = "NVSHMEM_DISABLE_CUDA_VMM", "NVSHMEM_SYMMETRIC_SIZE"
_INTERFACE = "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"
_LEAST_STEP, _USUAL_STEP = 2 * _MIB, 512 * _MIB  # the driver's large pages; NVSHMEM's default
_USUAL_MOST = 124 * _GIB  # that NVSHMEM has addresses for by default, rounded down
_INTERNAL = 64 * _MIB  # for NVSHMEM's teams, barriers and device state
_LIBRARY = "nvshmem"
ID_BYTES = 128

_serial = threading.Lock()  # around every host call: the library promises nothing to two threads at a time
_started: Library | None = None


def core() -> Any:
    """nvshmem4py. Raises UnsupportedError, naming the extra, if it or NVSHMEM is not installed."""
    try:
        import nvshmem.core
    except ImportError as error:
        raise UnsupportedError(
            f"{error.name or 'nvshmem4py'} is not installed; NVSHMEM needs: {install('nvshmem')} "
            "(`odc doctor --need nvshmem` shows what fits)"
        ) from error
    return nvshmem.core


def set_environment(
    nbytes: int, interface: str | None, rank: int, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Prepare what NVSHMEM reads from the environment when it starts, and nowhere else; what is set there stays.

    Its heap takes physical memory in steps, whose default of 512 MiB would lose as much, within a range of addresses of
    `NVSHMEM_MAX_MEMORY_PER_GPU`. Only without CUDA's virtual memory (`NVSHMEM_DISABLE_CUDA_VMM=1`) does it reserve all
    at the start, by `NVSHMEM_SYMMETRIC_SIZE`. `interface` is the one through which the ranks of other hosts are met.

    Raises HeapMemoryError where the environment sets less than `nbytes`, which is to be allocated, needs.
    """
    name, needed = (_STATIC_BYTES if _is_set(environment, _STATIC) else _MOST), nbytes + _INTERNAL
    if name == _MOST:
        step = _LEAST_STEP
        while step < _USUAL_STEP and 64 * step < nbytes:  # so that less than 1/32 is lost
            step *= 2
        environment.setdefault(_GRANULARITY, str(step))
        needed = nbytes + _INTERNAL + bytes_of(environment[_GRANULARITY])
    asked = environment.get(name)
    if asked is not None and bytes_of(asked) < needed:
        raise HeapMemoryError(
            f"rank {rank}: the environment sets {name}={asked}, but NVSHMEM needs {needed} bytes; unset it"
        )
    if name == _STATIC_BYTES or needed > _USUAL_MOST:
        environment.setdefault(name, str(needed))
    if interface is not None:
        environment.setdefault(_INTERFACE, interface)


def _is_set(environment: MutableMapping[str, str], name: str) -> bool:
    return environment.get(name, "0").strip().lower() not in ("", "0", "n", "no", "f", "false")


def bytes_of(text: str) -> int:
    """A size as NVSHMEM reads it: a number, and K, M, G or T for powers of 1024 (a "B" may follow)."""
    word = text.strip().upper().removesuffix("B").removesuffix("I")
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(word[-1:], 1)
    return int(float(word.rstrip("KMGT")) * scale)


def make_id() -> bytes:
    """A unique id, with which every rank of the job starts. On one rank."""
    with _serial:
        uid = core().get_unique_id()
    return bytes(_bytes_at(uid.ptr))


def _bytes_at(address: int) -> Any:
    import ctypes

    return (ctypes.c_char * ID_BYTES).from_address(address)


class Library:
    """NVSHMEM, started in this process: a collective of all `ranks` ranks of the job, on the main thread.

    `device` is current and `uid` comes from `make_id`. Any thread that has the device may call any method.

    Attributes:
        base: address of the slab of `nbytes` bytes, which lies at this distance from every address inside it on every
            rank. Its memory is this process's until `finalize`.
    """

    def __init__(self, uid: bytes, rank: int, ranks: int, device: torch.device, nbytes: int) -> None:
        global _started
        library = core()
        from cuda.core import Device
        from nvshmem import bindings

        self.rank, self.ranks, self.device, self.nbytes = rank, ranks, device, nbytes
        self._bindings = bindings
        here = Device(device.index)
        here.set_current()
        with _serial:
            empty = library.get_unique_id(empty=True)
            _bytes_at(empty.ptr)[:] = uid
            library.init(device=here, uid=empty, rank=rank, nranks=ranks, initializer_method="uid")
            self.base = int(bindings.malloc(nbytes))
        if not self.base:
            raise HeapMemoryError(f"rank {rank}: a rank's NVSHMEM has not allocated {nbytes} bytes of its device")
        _started = self

    def holds(self, memory: torch.Tensor) -> bool:
        """Whether `memory`, uint8 [n], lies in this rank's slab."""
        return self.base <= memory.data_ptr() and memory.data_ptr() + memory.numel() <= self.base + self.nbytes

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] at an address of the slab, of this rank's or a peer's; not to be touched after `finalize`."""
        return torch.as_tensor(AtAddress(address, nbytes), device=self.device)

    def pointer(self, address: int, rank: int) -> int:
        """Where `rank` (global) has what this rank has at `address` of its slab; 0 where no pointer leads there."""
        with _serial:
            return int(self._bindings.ptr(address, rank))

    def get(self, into: torch.Tensor, offset: int, rank: int) -> None:
        """Fill `into`, in this rank's slab, from the slab of `rank`, `offset` bytes from its start.

        Does not wait: the bytes are there once the current stream, which no other thread uses, is past this call.
        """
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with _serial:
            self._bindings.getmem_nbi_on_stream(into.data_ptr(), self.base + offset, into.numel(), rank, stream)
            self._bindings.quiet_on_stream(stream)

    def finalize(self) -> None:
        """Give the memory back: a collective of all ranks, after which no view may be used."""
        global _started
        with _serial:
            core().finalize()
        _started = None


def started() -> Library | None:
    """NVSHMEM of this process, while it is started."""
    return _started


@dataclass(frozen=True)
class SlabPiece:
    """What one heap takes of the slab on each of its `ranks`."""

    offset: int
    nbytes: int
    ranks: tuple[int, ...]


def place_piece(taken: list[SlabPiece], nbytes: int, ranks: tuple[int, ...], room: int) -> SlabPiece | None:
    """The first piece of a slab of `room` bytes that is free on all of `ranks`; None if there is none.

    Heaps that share no rank may lie at the same offset.
    """
    end, size = 0, slab_bytes(nbytes)
    for piece in sorted((piece for piece in taken if not set(ranks).isdisjoint(piece.ranks)), key=lambda p: p.offset):
        if piece.offset - end >= size:
            break
        end = max(end, piece.offset + piece.nbytes)
    return SlabPiece(end, size, ranks) if end + size <= room else None


def slab_bytes(nbytes: int) -> int:
    """What a heap of so many bytes takes of a slab, in which each starts on one of the driver's large pages."""
    return round_up(nbytes, _LEAST_STEP)


def initialize_kernels() -> None:
    """Give every Triton kernel that links NVSHMEM the address of its state, once, when the kernel is first loaded.

    Triton has one hook for the whole process; a hook that is installed already is called first.
    """
    import triton

    before = triton.knobs.runtime.jit_post_compile_hook
    if getattr(before, "odc_nvshmem", False):
        return

    def hook(**call: Any) -> Any:
        answer = before(**call) if before is not None else None
        if not call["is_manual_warmup"] and _LIBRARY in str(call["compile"]["extern_libs"]):
            _initialize(call["fn"].jit_function, call["compile"]["device"], call["key"])
        return answer

    hook.odc_nvshmem = True  # type: ignore[attr-defined]
    triton.knobs.runtime.jit_post_compile_hook = hook


def _initialize(function: Any, device: int, key: Any) -> None:
    from nvshmem import bindings

    kernel = function.device_caches[device][0][key]
    _ = kernel.run  # loads the module
    with _serial:
        bindings.cumodule_init(int(kernel.module))
