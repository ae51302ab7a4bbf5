"""What every symmetric heap does, by each of those that need no device; tests/gpu/test_heap.py has the others."""

from __future__ import annotations

from support.conformance import HeapConformance
from support.heaps import shm_group, without_a_device


class TestShmHeap(HeapConformance):
    group = staticmethod(shm_group)


class TestCudaHeapWithoutADevice(HeapConformance):
    group = staticmethod(without_a_device)
