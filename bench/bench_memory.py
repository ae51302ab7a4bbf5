"""What the heap costs against plain memory: copies out of and into a peer's heap, words, the lock, a heap's life.

Both heaps live in this process, which maps a peer's memory from its descriptor as another process would, and is alone
in using it. Compare rows of one group: absolute figures depend on the machine and its load. torch uses one thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from odc.memory import MUTEX_BYTES, Attachment, RobustMutex, ShmHeap, Words, choose, libatomic, plain_x86_64

KIB, MIB = 1 << 10, 1 << 20
SIZES = [64 * KIB, MIB, 16 * MIB, 64 * MIB]
LARGEST = max(SIZES)
ROUNDS = {64 * KIB: 3000, MIB: 1000, 16 * MIB: 60, 64 * MIB: 20}


def two_heaps(nbytes: int) -> list[ShmHeap]:
    heaps: list[ShmHeap] = []

    def connect(member: int) -> Attachment:
        return Attachment(os.dup(heaps[member].fd), heaps[member].nbytes, heaps[member].digest)

    heaps += [ShmHeap("bench", (0, 1), me, connect, 10.0) for me in range(2)]
    for heap in heaps:
        heap.allocate("words", 64)
        heap.allocate("mutex", MUTEX_BYTES)
        heap.allocate("data", nbytes)
        heap.seal()
    return heaps


@pytest.fixture(scope="module")
def heap() -> Iterator[ShmHeap]:
    torch.set_num_threads(1)
    heaps = two_heaps(LARGEST)
    RobustMutex.initialize(heaps[1].address(1, "mutex"))
    yield heaps[0]
    for one in heaps:
        one.close()


def show_rate(benchmark: Any, nbytes: int) -> None:
    benchmark.extra_info["GB/s, best"] = round(nbytes / benchmark.stats.stats.min / 1e9, 2)
    benchmark.extra_info["GB/s, median"] = round(nbytes / benchmark.stats.stats.median / 1e9, 2)


@pytest.mark.parametrize("nbytes", SIZES, ids=lambda n: f"{n // KIB}KiB")
@pytest.mark.parametrize("kind", ["memcpy", "get", "put", "add"])
def test_copy(benchmark: Any, heap: ShmHeap, kind: str, nbytes: int) -> None:
    """`memcpy` is private memory to private memory; `add` is fp32 into the peer, without a lock."""
    benchmark.group = f"copy {nbytes // KIB} KiB"
    count = nbytes // 4
    mine, other = torch.ones(count), torch.ones(count)
    peer = heap.tensor(1, "data", torch.float32, numel=count)
    action, source = {
        "memcpy": (other.copy_, mine),
        "get": (mine.copy_, peer),
        "put": (peer.copy_, mine),
        "add": (peer.add_, mine),
    }[kind]
    benchmark.pedantic(action, args=(source,), rounds=ROUNDS[nbytes], warmup_rounds=2)
    show_rate(benchmark, nbytes)


BACKENDS = {"libatomic": libatomic, "plain": plain_x86_64}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operation", ["load", "store", "add"])
def test_word(benchmark: Any, heap: ShmHeap, backend: str, operation: str) -> None:
    benchmark.group = "word"
    if backend == "plain" and (operation == "add" or choose("none.so").name != "plain x86-64"):
        pytest.skip("plain accesses offer load and store on x86-64")
    words = Words(heap.address(1, "words"), 8, heap, BACKENDS[backend]())
    arguments = {"load": (3,), "store": (3, 1), "add": (3, 1)}[operation]
    benchmark(getattr(words, operation), *arguments)


def test_word_through_the_heap(benchmark: Any, heap: ShmHeap) -> None:
    """A load, with the look-up of the peer and the region before it."""
    benchmark.group = "word"
    benchmark(lambda: heap.words(1, "words").load(0))


def test_lock_and_unlock(benchmark: Any, heap: ShmHeap) -> None:
    benchmark.group = "lock"
    lock = RobustMutex(heap.address(1, "mutex"), heap)

    def both() -> None:
        lock.acquire(1.0)
        lock.release()

    benchmark(both)


def test_held(benchmark: Any, heap: ShmHeap) -> None:
    benchmark.group = "lock"
    lock = RobustMutex(heap.address(1, "mutex"), heap)

    def block() -> None:
        with lock.held(1.0):
            pass

    benchmark(block)


def test_view(benchmark: Any, heap: ShmHeap) -> None:
    """Makes one tensor over a region of a peer. Callers keep the tensors that they use often."""
    benchmark.group = "view"
    benchmark(heap.tensor, 1, "data", torch.float32, offset=16, numel=1024)


@pytest.mark.parametrize("mebibytes", [1, 256])
def test_life(benchmark: Any, mebibytes: int) -> None:
    """Creates, prefaults, attaches once and closes a pair of heaps."""
    benchmark.group = "life"

    def live() -> None:
        first, second = two_heaps(mebibytes * MIB)
        first.words(1, "words")
        first.close()
        second.close()

    benchmark.pedantic(live, rounds=5, warmup_rounds=1)


def test_attach(benchmark: Any) -> None:
    """Maps and prefaults 256 MiB of a peer that are present already."""
    benchmark.group = "life"
    first, second = two_heaps(256 * MIB)

    def attach() -> None:
        first._mappings[1] = None
        first._words.clear()
        first.words(1, "words")

    benchmark.pedantic(attach, rounds=5, warmup_rounds=1)
    first.close()
    second.close()
