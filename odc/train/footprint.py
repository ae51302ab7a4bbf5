"""How much memory a rank really uses, as Linux counts it.

Chose resident pages as the kernel sees them over adding up tensors: it also holds what libraries, buffers and the heap
take. Pages that ranks share (the heap is mapped by every peer) are divided among those that map them, or two ranks
would count them twice. The cost is that memory the C library has freed but kept counts too, up to `trim`.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

_STATUS = Path("/proc/self/status")
_ROLLUP = Path("/proc/self/smaps_rollup")


def trim() -> None:
    """Gives memory that the C library holds but does not use back to the system. Milliseconds; no-op without glibc."""
    trimmer = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trimmer is not None:
        trimmer(0)


def held_bytes() -> int:
    """Bytes resident now, shared pages divided among the processes that map them."""
    return _field(_ROLLUP, "Pss")


def reset_peak() -> None:
    """Starts a new peak from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Largest resident size since `reset_peak`, shared pages divided among the processes that map them.

    Shared memory is taken as it is now: the heap is mapped whole and never grows.
    """
    return _field(_STATUS, "VmHWM") - _field(_STATUS, "RssShmem") + _field(_ROLLUP, "Pss_Shmem")


def _field(path: Path, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{path} has no {name}")
    return int(found.group(1)) * 1024
