"""NVSHMEM, started through the job's own store, and a heap in its symmetric memory.

NVSHMEM starts with a unique id that travels through the job's key-value store: it needs no launcher and no collective
of the process group. It is loaded on first use (extra `nvshmem`) and started once in each process for the whole job;
its rank numbers ("PEs") are global ranks. It reserves its memory at the start, in one piece (`needed_bytes`).
Allocation is a collective of all ranks, and memory is returned only at the job's end.

A peer whose memory has no pointer here (on another host) has 0 in the pointer table; kernels reach it by NVSHMEM's
device calls (`NvshmemHeap.symmetric`). Words stay in shared memory, so for now the ranks of a heap must share a host.
Nothing here has run on a GPU yet, and no setting of `fully_shard` selects it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from odc.errors import HeapMemoryError, UnsupportedError, install
from odc.memory.cuda import CudaHeap
from odc.memory.layout import round_up

_SIZE = "NVSHMEM_SYMMETRIC_SIZE"  # the library reads it when it starts; there is no other way to set the size
_GRANULE = 2 << 20  # each heap starts on one of the driver's large pages
_INTERNAL = 64 << 20  # for NVSHMEM's teams, barriers and device state
_LIBRARY = "nvshmem"

_kept: list[torch.Tensor] = []  # allocations; freeing one is a collective, so they last as long as the job
_started: tuple[int, int] | None = None  # (rank, ranks)


class KeyValues(Protocol):
    """The part of `odc.net.JobStore` that is used here."""

    timeout_s: float

    def set(self, key: str, value: bytes) -> None: ...
    def await_key(self, key: str, late: str, *, culprit: int) -> bytes: ...


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


def needed_bytes(heaps: Sequence[int]) -> int:
    """What NVSHMEM must reserve on each rank for heaps of these sizes in bytes, and for itself."""
    return sum(round_up(nbytes, _GRANULE) for nbytes in heaps) + _INTERNAL


def start(store: KeyValues, rank: int, ranks: int, device: torch.device, nbytes: int) -> None:
    """Start NVSHMEM in this process; every rank of the job calls it. A second call is a no-op.

    Args:
        store: store of the job, where rank 0 leaves the unique id. Its timeout is the deadline for that: NVSHMEM's own
            collective afterwards has none.
        device: this rank's CUDA device, which must be current.
        nbytes: memory to reserve, from `needed_bytes`.

    Raises UnsupportedError, HeapMemoryError and WaitTimeoutError as `core`, `reserve` and `exchange_id` do.
    """
    global _started
    if _started is not None:
        return
    library = core()
    reserve(nbytes, rank)
    uid = exchange_id(library, store, rank)
    from cuda.core import Device

    here = Device(device.index)
    here.set_current()
    library.init(device=here, uid=uid, rank=rank, nranks=ranks, initializer_method="uid")
    _started = rank, ranks


def reserve(nbytes: int, rank: int) -> None:
    """Make NVSHMEM reserve `nbytes`, or as much more as the environment asks for; HeapMemoryError if that is less."""
    asked = os.environ.get(_SIZE)
    if asked is None:
        os.environ[_SIZE] = str(nbytes)
    elif bytes_of(asked) < nbytes:
        raise HeapMemoryError(
            f"rank {rank}: the environment sets {_SIZE}={asked}, but the heaps need {nbytes} bytes; unset it"
        )


def bytes_of(text: str) -> int:
    """A size as NVSHMEM reads it: a number, and K, M, G or T for powers of 1024 (a "B" may follow)."""
    word = text.strip().upper().removesuffix("B").removesuffix("I")
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(word[-1:], 1)
    return int(float(word.rstrip("KMGT")) * scale)


def exchange_id(library: Any, store: KeyValues, rank: int) -> Any:
    """NVSHMEM's unique id, made by rank 0 and left in the store; WaitTimeoutError if it does not come in time."""
    import numpy as np

    key = "odc/nvshmem/id"
    if rank == 0:
        uid = library.get_unique_id()
        store.set(key, uid._data.tobytes())
        return uid
    late = (
        f"rank {rank}, waiting for rank 0 to start NVSHMEM: it has left no id in {store.timeout_s:g} s; every rank "
        "must run the same model on the same kind of device"
    )
    uid = library.get_unique_id(empty=True)
    uid._data.view(np.uint8)[:] = np.frombuffer(store.await_key(key, late, culprit=0), np.uint8)
    return uid


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
    bindings.cumodule_init(int(kernel.module))


class NvshmemHeap(CudaHeap):
    """A `CudaHeap` whose data lies in NVSHMEM's symmetric memory; `start` comes first.

    `seal` is a collective of all ranks of the job: its `group` is the world, and `meet` is called first.
    """

    def seal(self, fingerprint: str = "") -> None:
        if _started is None:
            raise UnsupportedError(f"{self._who()}: NVSHMEM was not started in this process")
        if self.ranks != tuple(range(_started[1])):
            raise UnsupportedError(
                f"{self._who()}: NVSHMEM's memory belongs to all {_started[1]} ranks of the job, in their order, but "
                f"this heap belongs to ranks {self.ranks}"
            )
        super().seal(fingerprint)

    def _create(self, nbytes: int) -> torch.Tensor:
        self._meet()
        try:
            local: torch.Tensor = core().bytetensor((nbytes,), dtype=torch.uint8)
        except Exception as error:  # nvshmem4py has error types of its own
            raise HeapMemoryError(
                f"{self._who()}: NVSHMEM does not have {nbytes} bytes left of its reserved memory: {error}"
            ) from error
        _kept.append(local)
        local.zero_()
        torch.cuda.current_stream(self.device).synchronize()
        return local

    def _map(self, local: torch.Tensor) -> dict[int, torch.Tensor]:
        peers = {member: _peer(local, rank, local[:0]) for member, rank in enumerate(self.ranks) if member != self.me}
        return peers | {self.me: local}

    def _base(self, member: int) -> torch.Tensor:
        base = super()._base(member)
        if not base.numel():
            raise UnsupportedError(
                f"{self._who()}: rank {self.ranks[member]} is on another host, so its memory has no address here; "
                "only kernels can reach it"
            )
        return base

    def base_addresses(self) -> torch.Tensor:
        """As in the protocol, with 0 for members that no pointer reaches."""
        bases = [super(NvshmemHeap, self)._base(member) for member in range(len(self.ranks))]
        return torch.tensor([base.data_ptr() if base.numel() else 0 for base in bases], dtype=torch.int64)

    def symmetric(self, make: Callable[[int, torch.Tensor], Any]) -> Any:
        """`make(local address, int32 [members] of PE numbers on the device)`: `odc.kernels.Symmetric` for launches."""
        local = super()._base(self.me)
        return make(local.data_ptr(), torch.tensor(self.ranks, dtype=torch.int32, device=local.device))


def _peer(local: torch.Tensor, rank: int, empty: torch.Tensor) -> torch.Tensor:
    """A peer's copy of `local`, or `empty` where no pointer reaches it."""
    from nvshmem import bindings

    if not bindings.ptr(local.data_ptr(), rank):
        return empty
    view: torch.Tensor = core().get_peer_tensor(local, rank)
    return view
