"""A symmetric heap in NVSHMEM's memory: a `CudaHeap` whose data is a piece of the slab of every rank.

The piece begins at the same offset on every rank of the heap, so an address of one rank names the same bytes of all. A
peer of this host is mapped by NVSHMEM; one on another host has no address here. It is read by `NvshmemEngine`, and
kernels reach it by NVSHMEM's device calls (`NvshmemHeap.symmetric`). Words stay in shared memory, as in every heap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from odc.errors import OdcError
from odc.memory import nvshmem
from odc.memory.cuda import CudaHeap
from odc.memory.heap import Lanes
from odc.memory.shm import ShmHeap

#: NVSHMEM, and the offset in its slab for a heap of so many bytes, the same on every rank of the heap.
Place = Callable[[int], tuple[nvshmem.Library, int]]


class NvshmemHeap(CudaHeap):
    """A `CudaHeap` whose `seal` calls `place`, on the main thread; that may wait, and raises as it likes."""

    def __init__(
        self, host: ShmHeap, device: torch.device, lanes: Lanes, place: Place, local: Sequence[int] | None = None
    ) -> None:
        super().__init__(host, device, lanes, local)
        self._place = place
        self._library: nvshmem.Library | None = None

    def _create(self, nbytes: int) -> torch.Tensor:
        self._library, offset = self._place(nbytes)
        return self._library.view(self._library.base + offset, nbytes)

    def _map(self, member: int) -> torch.Tensor:
        local = self.whole(self.me)
        assert self._library is not None
        address = self._library.pointer(local.data_ptr(), self.ranks[member])
        if not address:
            raise OdcError(
                f"{self._who()}: NVSHMEM has no pointer to the memory of rank {self.ranks[member]}, although it is on "
                f"this host: {self.device} cannot map it; see `odc doctor --need cuda`"
            )
        return self._library.view(address, local.numel())

    def symmetric(self, make: Callable[[int, torch.Tensor], Any]) -> Any:
        """`make(local address, int32 [members] of PE numbers on the device)`: `odc.kernels.Symmetric` for launches."""
        local = self.whole(self.me)
        return make(local.data_ptr(), torch.tensor(self.ranks, dtype=torch.int32, device=local.device))
