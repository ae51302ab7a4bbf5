"""The CUDA heap's own logic (two memories behind one heap) without a device: memory files stand for device memory.

What torch's symmetric memory and CUDA do is not tested here: tests/gpu does, where there is a device.
"""

from __future__ import annotations

import gc
import os
import threading
import uuid
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.conformance import DEADLINE_S, sealed
from support.heaps import without_a_device
from support.on_ranks import on_ranks

from odc.errors import HeapMemoryError, OdcError, UnsupportedError
from odc.memory import _torch_symmetric as symmetric
from odc.memory import cuda
from odc.memory._torch_symmetric import require_nvml
from odc.memory.cuda import CudaLanes


@on_ranks(2)
def test_words_and_data_lie_apart(rank: int, world: int) -> None:
    regions = (("flags", 128), ("large", 1 << 20))
    with sealed(without_a_device, "wordsanddata", rank, world, regions) as heap:
        data, words = heap.address(rank, "large"), heap.address(rank, "flags")
        start = int(heap.base_addresses()[rank])
        assert start <= data < start + (1 << 20), "data lies in the device's memory"
        assert not start <= words < start + (1 << 20), "words do not"
        with pytest.raises(OdcError, match="'large' lies on meta; ask for it with words=True"):
            heap.words(rank, "large")
        with pytest.raises(KeyError):
            heap.words(rank, "nowhere")
        assert heap.bytes_by_name().items() >= dict(regions).items(), heap.bytes_by_name()
        assert heap.nbytes > os.fstat(heap.fd).st_size + (1 << 20) - 1, "both memories count"
        dist.barrier()


def meets_before_mapping(rank: int, world: int, identity: str) -> list[str]:
    """Order of what happens at the first look at a peer's data, and that it happens once."""
    order: list[str] = []
    with without_a_device(identity, tuple(range(world)), rank, DEADLINE_S) as heap:
        heap.allocate("flags", 64, words=True)
        heap.allocate("data", 64)
        heap.seal()
        mapped = cuda.symmetric.map_peers
        heap._meet = lambda: order.append("meet")
        cuda.symmetric.map_peers = lambda *args, **named: order.append("map") or mapped(*args, **named)  # type: ignore[func-returns-value]
        heap.tensor(rank, "data", torch.uint8)
        heap.words(1 - rank, "flags")
        order.append("first look")
        assert not heap.attached(1 - rank), "words alone map nothing"
        heap.tensor(1 - rank, "data", torch.uint8)
        assert heap.attached(1 - rank)
        heap.tensor(1 - rank, "data", torch.uint8)
        dist.barrier()
    return order


def test_ranks_meet_once_before_device_memory_is_mapped(ranks) -> None:
    assert ranks(2).run(meets_before_mapping, uuid.uuid4().hex[:12]) == [["first look", "meet", "map"]] * 2


def refuses(rank: int, world: int, identity: str, where: str, why: str) -> str:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"CUDA driver error: {why}\nstack of torch")

    with without_a_device(identity, (10, 11), rank, DEADLINE_S) as heap:
        setattr(cuda.symmetric, where, fail)
        heap.allocate("flags", 64, words=True)
        heap.allocate("data", 1 << 20)
        try:
            heap.seal()
            heap.tensor(1 - rank, "data", torch.uint8)
        except (HeapMemoryError, OdcError) as error:
            dist.barrier()
            return f"{type(error).__name__}: {error}"
        raise AssertionError("nothing was refused")


@pytest.mark.parametrize(
    ("where", "why", "stated"),
    [
        (
            "allocate",
            "out of memory",
            "HeapMemoryError: rank 11, heap .*needs 1.0 MiB of meta, which had 1024.0 MiB free: CUDA driver error",
        ),
        (
            "allocate",
            "not permitted",
            "OdcError: rank 11, heap .*no memory that peers can map: CUDA.*not permitted; see",
        ),
        (
            "map_peers",
            "out of memory",
            "OdcError: rank 11, heap .*cannot map each other.*out of memory; see `odc doctor --need cuda`",
        ),
    ],
)
def test_what_torch_refuses_is_reported_in_one_line(ranks, where: str, why: str, stated: str) -> None:
    import re

    message = ranks(2).run(refuses, uuid.uuid4().hex[:12], where, why)[1]
    assert re.search(stated, message), message
    assert "stack of torch" not in message


def has_it_after(rank: int, world: int, identity: str, refusals: int) -> tuple[str, list[str]]:
    """What comes of a heap that torch refuses so many times, and what was asked for in which order."""
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch, without_a_device(identity, (10, 11), rank, DEADLINE_S) as heap:
        allocate = cuda.symmetric.allocate

        def refuse(nbytes: int, device: torch.device) -> torch.Tensor:
            asked.append("heap")
            if asked.count("heap") <= refusals:
                raise RuntimeError("CUDA driver error: out of memory")
            return allocate(nbytes, device)

        patch.setattr(cuda.symmetric, "allocate", refuse, raising=False)
        patch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty_cache"))
        heap.allocate("data", 1 << 20)
        try:
            heap.seal()
        except HeapMemoryError as error:
            return str(error), asked
        return "", asked


@pytest.mark.parametrize("refusals", [0, 1, 2])
def test_memory_that_torch_only_caches_is_given_to_the_heap(ranks, refusals: int) -> None:
    for error, asked in ranks(2).run(has_it_after, uuid.uuid4().hex[:12], refusals):
        assert asked == (["heap", "empty_cache", "heap"] if refusals else ["heap"]), "once more, and not again"
        assert ("out of memory" in error) == (refusals == 2)


def test_no_management_library_is_an_error_and_no_crash() -> None:
    with pytest.raises(UnsupportedError, match="libnvidia-ml-that-is-nowhere.*compute,utility"):
        require_nvml("libnvidia-ml-that-is-nowhere.so.1")


def maps_on(rank: int, world: int, identity: str, devices: list[str], shared: bool) -> object:
    """What is given to torch's exchange where the ranks are on these devices, or why it was not begun."""
    with pytest.MonkeyPatch.context() as patch, without_a_device(identity, (10, 11), rank, DEADLINE_S) as heap:
        patch.delenv(symmetric.SHARE, raising=False)
        if shared:
            patch.setenv(symmetric.SHARE, "1")
        patch.setattr(cuda, "_device_text", lambda device: devices[rank])
        heap._meet = lambda: dist.barrier()
        heap.allocate("data", 64)
        heap.seal()
        try:
            heap.tensor(1 - rank, "data", torch.uint8)
        except OdcError as error:
            dist.barrier()
            return str(error)
        dist.barrier()
        return cuda.symmetric.same_numbers


@pytest.mark.parametrize(
    ("devices", "shared", "same_numbers"),
    [(["0 GPU-a", "1 GPU-b"], False, False), (["0 GPU-a", "0 GPU-b"], False, True), (["0 GPU-a"] * 2, True, False)],
    ids=["all visible", "one visible each", "shared for tests"],
)
def test_torch_knows_where_equal_numbers_are_different_devices(
    ranks, devices: list[str], shared: bool, same_numbers: bool
) -> None:
    assert ranks(2).run(maps_on, uuid.uuid4().hex[:12], devices, shared) == [same_numbers] * 2


def test_a_device_that_two_ranks_took_is_refused_before_they_meet(ranks) -> None:
    for message in ranks(2).run(maps_on, uuid.uuid4().hex[:12], ["3 GPU-a"] * 2, False):
        assert "ranks 10 and 11 are both on one device (3 GPU-a)" in str(message)
        assert "set_device(LOCAL_RANK)" in str(message) and f"{symmetric.SHARE}=1" in str(message)


def adds(rank: int, world: int, identity: str, movers: list[bool], links: list[bool]) -> tuple[bool, list[object]]:
    """Whether peers are added to atomically where each rank's mover and links can do so, and what links are asked."""
    asked: list[object] = []
    with pytest.MonkeyPatch.context() as patch, without_a_device(identity, (10, 11), rank, DEADLINE_S) as heap:

        def answer(device: torch.device, uuids: list[str]) -> bool:
            asked.append(uuids)
            return links[rank]

        patch.setattr(cuda.device_links, "adds_atomically", answer)
        heap._meet = lambda: dist.barrier()
        heap.allocate("data", 64)
        heap.adds_atomically = movers[rank]
        heap.seal()
        found = heap.adds_atomically and heap.adds_atomically
        dist.barrier()
        return found, asked


@pytest.mark.parametrize("movers", [[True, True], [False, True]])
@pytest.mark.parametrize("links", [[True, True], [True, False]])
def test_all_ranks_add_atomically_or_none(ranks, movers: list[bool], links: list[bool]) -> None:
    """A rank that adds under a lock and one that takes none would lose each other's gradients."""
    found = ranks(2).run(adds, uuid.uuid4().hex[:12], movers, links)
    for (atomic, asked), mover in zip(found, movers, strict=True):
        assert atomic == (all(movers) and all(links))
        assert asked == ([["GPU-0", "GPU-1"]] if mover else []), "once, and not where it does not matter"


@pytest.mark.parametrize("same_numbers", [False, True])
def test_torch_makes_no_multicast_object(monkeypatch: pytest.MonkeyPatch, same_numbers: bool) -> None:
    """Its switches are set while it exchanges handles, and as they were afterwards."""
    names = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
    monkeypatch.setenv(names[0], "0")
    monkeypatch.delenv(names[1], raising=False)
    seen: list[list[str | None]] = []

    def rendezvous(*_: object) -> None:
        seen.append([os.environ.get(name) for name in names])

    monkeypatch.setattr(symmetric, "_module", lambda: SimpleNamespace(rendezvous=rendezvous))
    group: Any = SimpleNamespace(group_name="g", size=lambda: 1)
    symmetric.map_peers(torch.zeros(1), group, 0, same_numbers=same_numbers)
    assert seen == [["1", "1" if same_numbers else None]]
    assert [os.environ.get(name) for name in names] == ["0", None]


def test_a_mapping_lasts_as_long_as_a_view_of_it() -> None:
    """A view as torch makes it of a peer's memory does not hold what maps it."""

    class Handle:
        buffer_ptrs = (0, 1)

        def get_buffer(self, peer: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(sizes, dtype=dtype)

    handle = Handle()
    mapped, local = weakref.ref(handle), torch.zeros(64, dtype=torch.uint8)
    part = symmetric._view(handle, 1, local)[8:16].view(torch.float32)
    with pytest.raises(RuntimeError, match="rank 0 of the group has no pointer here"):
        symmetric._view(handle, 0, local)
    del handle
    gc.collect()
    assert mapped() is not None and part.tolist() == [0.0, 0.0]
    del part
    gc.collect()
    assert mapped() is None


def test_threads_other_than_the_training_thread_get_its_device_before_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a lane torch goes back to what was current: a context on device 0 for every rank."""
    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("device", device.index)))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: calls.append(("lane", stream)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: f"{device}, priority {priority}")
    lanes = CudaLanes(torch.device("cuda", 3), {"fetch": "torch's"})  # type: ignore[dict-item]
    lanes.lane("fetch")
    assert calls == [("lane", "torch's")], "the training thread's device is the caller's affair"
    calls.clear()
    thread = threading.Thread(target=lambda: [lanes.lane("server") for _ in range(2)])
    thread.start()
    thread.join()
    assert calls == [("device", 3), *[("lane", "cuda:3, priority -1")] * 2]
