"""The CUDA heap's own logic (two memories behind one heap) without a device: memory files stand for device memory.

What CUDA's driver does is not tested here: tests/gpu does, where there is a device, or an emulated one.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from support.conformance import DEADLINE_S, sealed
from support.heaps import without_a_device
from support.on_ranks import on_ranks

from odc.errors import HeapMemoryError, OdcError
from odc.memory import cuda
from odc.memory.driver_calls import DriverError


@on_ranks(2)
def test_words_and_data_lie_apart(rank: int, world: int) -> None:
    regions = (("flags", 128), ("large", 1 << 20))
    with sealed(without_a_device, "wordsanddata", rank, world, regions) as heap:
        data, words = heap.address(rank, "large"), heap.address(rank, "flags")
        start = heap.whole(rank).data_ptr()
        assert start <= data < start + (1 << 20), "data lies in the device's memory"
        assert not start <= words < start + (1 << 20), "words do not"
        with pytest.raises(OdcError, match="'large' lies on meta; ask for it with words=True"):
            heap.words(rank, "large")
        with pytest.raises(KeyError):
            heap.words(rank, "nowhere")
        assert heap.bytes_by_name().items() >= dict(regions).items(), heap.bytes_by_name()
        assert heap.nbytes > os.fstat(heap.fd).st_size + (1 << 20) - 1, "both memories count"
        dist.barrier()


def maps_when_used(rank: int, world: int, identity: str) -> list[str]:
    """What maps when, in threads of all ranks that look at peers in orders of their own."""
    mapped: list[str] = []
    with without_a_device(identity, tuple(range(world)), rank, DEADLINE_S) as heap:
        heap.allocate("flags", 64, words=True)
        heap.allocate("data", 64)
        heap.seal()
        map_one = heap._map
        heap._map = lambda member: mapped.append(f"map {member}") or map_one(member)  # type: ignore[method-assign, func-returns-value]
        heap.tensor(rank, "data", torch.uint8)
        peers = [(rank + step) % world for step in range(1, world)]
        for peer in peers:
            heap.words(peer, "flags")
        mapped.append("first look")
        assert not any(map(heap.attached, peers)), "words alone map nothing"
        if rank == 0:  # maps no peer before all others have mapped it
            dist.barrier()
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda peer: heap.tensor(peer, "data", torch.uint8), 4 * peers[:1]))
        assert [heap.attached(peer) for peer in peers] == [True] + [False] * (world - 2), "one member at a time"
        if rank:
            dist.barrier()
        for member in range(world):
            heap.whole(member)
        dist.barrier()
    return mapped


def test_a_peer_is_mapped_once_at_its_first_use_and_no_rank_waits_for_another(ranks) -> None:
    found = ranks(3).run(maps_when_used, uuid.uuid4().hex[:12])
    assert found == [["first look", *(f"map {(rank + step) % 3}" for step in (1, 2))] for rank in range(3)]


def of_devices() -> int:
    """Descriptors of device memory that this process holds."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found += "memfd:device" in os.readlink(f"/proc/self/fd/{fd}")
    return found


def closes_descriptors(rank: int, world: int, identity: str) -> None:
    """Those of peers when their memory is mapped, all others with the heap; forked children have none."""
    with without_a_device(identity, tuple(range(world)), rank, DEADLINE_S) as heap:
        heap.allocate("flags", 64, words=True)
        heap.allocate("data", 64)
        heap.seal()
        assert of_devices() == 1
        for member in range(world):
            heap.words(member, "flags")
        assert of_devices() == world
        child = os.fork()
        if child == 0:
            os._exit(of_devices())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a data loader keeps device memory alive"
        heap.tensor((rank + 1) % world, "data", torch.uint8)
        assert of_devices() == world - 1
        dist.barrier()
        heap.close()
        assert of_devices() == 0, "also of a peer that was never mapped"
        dist.barrier()


def test_descriptors_of_device_memory_are_closed(ranks) -> None:
    ranks(3).run(closes_descriptors, uuid.uuid4().hex[:12])


class Broken:
    """Lanes of a device that stops working."""

    def settle(self) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")


@on_ranks(1)
def test_a_heap_that_cannot_be_filled_with_zeros_keeps_no_descriptor(rank: int, world: int) -> None:
    with without_a_device("broken", (rank,), rank, DEADLINE_S) as heap:
        heap.lanes = Broken()  # type: ignore[assignment]
        heap.allocate("data", 64)
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            heap.seal()
        assert of_devices() == 0 and not heap.sealed


class Refusal(int):
    """A result as cuda.bindings has them."""

    name = ""

    @classmethod
    def named(cls, number: int, name: str) -> Refusal:
        found = cls(number)
        found.name = name
        return found


FULL, REFUSED = Refusal.named(2, "CUDA_ERROR_OUT_OF_MEMORY"), Refusal.named(800, "CUDA_ERROR_NOT_PERMITTED")


def refuses(rank: int, world: int, identity: str, where: str, number: int, again: bool) -> str:
    """The error of a use of a peer's memory, or of the one after it."""

    def fail(*_: object, **__: object) -> None:
        raise DriverError("cuAsk", FULL if number == FULL else REFUSED)

    with without_a_device(identity, (10, 11), rank, DEADLINE_S) as heap:
        setattr(cuda.driver_memory, where, fail)
        heap.allocate("flags", 64, words=True)
        heap.allocate("data", 1 << 20)
        try:
            heap.seal()
            with contextlib.suppress(*([OdcError] if again else [])):
                heap.tensor(1 - rank, "data", torch.uint8)
            heap.tensor(1 - rank, "data", torch.uint8)
        except (HeapMemoryError, OdcError) as error:
            dist.barrier()
            return f"{type(error).__name__}: {error}"
        raise AssertionError("nothing was refused")


@pytest.mark.parametrize(
    ("where", "number", "again", "stated"),
    [
        (
            "allocate",
            2,
            False,
            "HeapMemoryError: rank 11, heap .*needs 1.0 MiB of meta, which had 1024.0 MiB free: cuAsk: CUDA error 2 ",
        ),
        (
            "allocate",
            800,
            False,
            r"OdcError: rank 11, .*no memory that peers can map: cuAsk: .*NOT_PERMITTED\); see",
        ),
        (
            "map_shared",
            2,
            False,
            r"OdcError: rank 11, .*meta cannot map the memory of rank 10: .*OF_MEMORY\); see `odc doctor",
        ),
        ("map_shared", 2, True, "meta cannot map the memory of rank 10: it could not be mapped before"),
    ],
)
def test_what_the_driver_refuses_is_reported(ranks, where: str, number: int, again: bool, stated: str) -> None:
    message = ranks(2).run(refuses, uuid.uuid4().hex[:12], where, number, again)[1]
    assert re.search(stated, message), message


def has_it_after(rank: int, world: int, identity: str, refusals: int) -> tuple[str, list[str]]:
    """What comes of a heap that the driver refuses so many times, and what was asked for in which order."""
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch, without_a_device(identity, (10, 11), rank, DEADLINE_S) as heap:
        allocate = cuda.driver_memory.allocate

        def refuse(nbytes: int, device: torch.device) -> tuple[torch.Tensor, int]:
            asked.append("heap")
            if asked.count("heap") <= refusals:
                raise DriverError("cuMemCreate", FULL)
            return allocate(nbytes, device)

        patch.setattr(cuda.driver_memory, "allocate", refuse, raising=False)
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
        assert ("OUT_OF_MEMORY" in error) == (refusals == 2)


Described = tuple[str, list[str]]  # a device, and those that it adds to atomically


def adds(rank: int, world: int, identity: str, movers: list[bool], described: list[Described]) -> list[bool]:
    """Whether peers are added to atomically, before the heap is sealed and then, twice."""
    with without_a_device(identity, (10, 11, 12), rank, DEADLINE_S) as heap:
        heap._described = lambda: described[rank]  # type: ignore[method-assign]
        heap.allocate("data", 64)
        heap.adds_atomically = movers[rank]
        found = [heap.adds_atomically]
        if rank == 1:  # the others ask before it has sealed
            time.sleep(0.2)
        heap.seal()
        found += [heap.adds_atomically, heap.adds_atomically]
        assert not any(heap.attached(member) for member in range(world) if member != rank), "nothing was mapped"
        dist.barrier()
    return found


ALL = ["a", "b", "c"]


@pytest.mark.parametrize(
    ("movers", "described", "atomic"),
    [
        ([True] * 3, [("a", ALL), ("b", ALL), ("c", ALL)], True),
        ([True, False, True], [("a", ALL), ("b", ALL), ("c", ALL)], False),
        ([True] * 3, [("a", ALL), ("b", ["b", "a"]), ("c", ALL)], False),
        ([True] * 3, [("a", ["a"]), ("b", ["b"]), ("c", ["c"])], False),  # each sees its own alone
        ([True] * 3, [("a", ["a"]), ("a", ["a"]), ("a", ["a"])], True),  # one for all
    ],
    ids=["all", "a mover cannot", "one pair cannot", "one visible each", "shared"],
)
def test_all_ranks_add_atomically_or_none(ranks, movers: list[bool], described: list[Described], atomic: bool) -> None:
    """A rank that adds under a lock and one that takes none would lose each other's gradients."""
    found = ranks(3).run(adds, uuid.uuid4().hex[:12], movers, described)
    assert found == [[mover, atomic, atomic] for mover in movers]


def test_more_devices_than_can_be_listed_count_as_not_reached(ranks) -> None:
    many = [f"device-{number:036d}" for number in range(200)]
    assert ranks(3).run(adds, uuid.uuid4().hex[:12], [True] * 3, [(many[-1], many)] * 3) == [[True, False, False]] * 3
