"""Twin of odc/memory/mapping.py, as far as test_shm.py does not cover it."""

from __future__ import annotations

import multiprocessing
import resource

import torch

from odc.memory import keep_freed

_NBYTES = 24 << 20


def _faults() -> int:
    """Page faults of filling as much memory as was just freed."""
    keep_freed(4 * _NBYTES)
    held = torch.ones(1 << 18)  # not at the top of the heap
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        first = torch.ones(_NBYTES // 8)
        second = torch.ones(_NBYTES // 8)
        del first, second
        found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del held
    return found


def _in_a_child() -> int:
    reader, writer = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=lambda: writer.send(_faults()))
    process.start()
    found: int = reader.recv()
    process.join()
    return found


def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert _in_a_child() < _NBYTES // 4096 / 8
