"""Twin of odc/memory/mapping.py, as far as test_shm.py and test_shm_end.py do not cover it."""

from __future__ import annotations

import ctypes
import multiprocessing
import resource

import torch

from odc.memory import keep_freed

_NBYTES = 24 << 20


def _faults() -> int:
    """Page faults of filling as much memory as was just freed, once malloc has settled."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 128 << 10), libc.mallopt(-1, 128 << 10)  # what glibc begins with
    keep_freed(4 * _NBYTES)
    found = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        units = [torch.ones(_NBYTES // 16) for _ in range(4)]
        del units
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found)


def _in_a_child() -> int:
    reader, writer = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=lambda: writer.send(_faults()))
    process.start()
    found: int = reader.recv()
    process.join()
    return found


def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert _in_a_child() < _NBYTES // 4096 / 8
