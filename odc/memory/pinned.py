"""Host memory that is mapped already, pinned: a device's copy engine then moves it without a stop, and beside compute.

torch pins what it allocates itself. The memory of a slot is shared with other processes, so it is registered.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from odc.errors import HeapMemoryError
from odc.memory.mapping import Mapping


class PinnedMapping:
    """All pages of a mapping, until `close`; the mapping stays for so long. CUDA is initialised in this process.

    Raises HeapMemoryError if CUDA refuses.
    """

    def __init__(self, mapping: Mapping) -> None:
        result = _cuda().cudaHostRegister(mapping.address, mapping.nbytes, 0)
        if code := int(result):
            raise HeapMemoryError(
                f"CUDA does not pin {mapping.nbytes / (1 << 20):.1f} MiB of host memory for the kept state (error "
                f"{code}): {_cuda().cudaGetErrorString(result)}"
            )
        self.mapping = mapping
        self._undo = weakref.finalize(self, _unpin, mapping, os.getpid())
        self._undo.atexit = False  # CUDA may have been shut down by then, and the pages go with the process

    def close(self) -> None:
        """Unpin. No copy may be under way. Idempotent; in a forked child it does nothing, which cannot use CUDA."""
        self._undo()


def _unpin(mapping: Mapping, pid: int) -> None:
    if os.getpid() == pid:
        _cuda().cudaHostUnregister(mapping.address)  # may fail, after an error that ends the use of the device


def _cuda() -> Any:
    return torch.cuda.cudart()
