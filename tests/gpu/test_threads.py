"""How odc's threads call CUDA: beside a capture of the training thread's, and where cores are few."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.device import EMULATED, own_device
from support.on_ranks import on_ranks
from support.ranks import RankPool
from support.waiting import until
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from odc import fully_shard
from odc.errors import OdcError
from odc.fsdp import live_roots
from odc.memory import device_links, driver_memory
from odc.memory.cuda_lanes import CudaLanes
from odc.memory.driver_memory import AtAddress
from odc.movers import driver
from odc.net.requests import ask
from odc.runtime import daemon

CUDA = next((path for path in os.environ.get("LD_PRELOAD", "").split(":") if "libemulated_cuda" in path), "")


def on_a_thread(work: Any) -> list[object]:
    """What the work returns on a thread of its own, or raises."""
    found: list[object] = []

    def live() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=live)
    thread.start()
    thread.join(60)
    return found


def query(lanes: CudaLanes, device: torch.device, event: object, *, as_odc: bool) -> bool:
    """What a thread of odc's does, or one that does not say that it leaves captures alone."""
    torch.cuda.set_device(device)
    if as_odc:
        lanes.lane("server")
        torch.empty(100 << 20, dtype=torch.uint8, device=device)  # more than is cached
    return lanes.reached(event)


def zeroes_on_another_device(rank: int, world: int) -> float:
    """What is left after a busy stream of another device was asked to fill and then to zero."""
    other = torch.device("cuda", 1)
    totals = torch.zeros(1 << 20, device=other)
    torch.zeros(1, device="cuda:0").item()
    torch.cuda.synchronize(other)
    with torch.cuda.stream(torch.cuda.Stream(other)):
        torch.cuda._sleep(500_000_000)
        totals.fill_(1.0)
        torch.cuda.set_device(0)
        driver.zero([totals])
        torch.cuda.synchronize(other)
    return float(totals.max())


def test_what_the_driver_zeroes_is_in_its_devices_turn() -> None:
    if not EMULATED and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    pool = RankPool(1, (("EMULATED_DEVICES", "2"),))
    try:
        assert pool.run(zeroes_on_another_device, timeout=240) == [0.0]
    finally:
        pool.close()


@on_ranks(1)
def test_a_threads_queries_leave_a_capture_of_the_training_thread_alone(rank: int, world: int) -> None:
    """In CUDA's default mode for captures, which any thread's unsafe call would end. An emulated one is pretended."""
    device = own_device(rank)
    lanes = CudaLanes(device)
    event, value = lanes.mark(), torch.zeros(8, device=device)
    torch.cuda.synchronize()
    if CUDA:
        cuda = ctypes.CDLL(CUDA)
        cuda.emulated_capture(1)
        assert on_a_thread(lambda: query(lanes, device, event, as_odc=True)) == [True]
        assert not cuda.emulated_capture(1), "odc's threads have ended the capture"
        (refused,) = on_a_thread(lambda: query(lanes, device, event, as_odc=False))
        assert isinstance(refused, RuntimeError) and cuda.emulated_capture(0), "any other thread's query does"
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value += 1
        found = on_a_thread(lambda: query(lanes, device, event, as_odc=True))
    graph.replay()
    assert found == [True] and value.tolist() == [1.0] * 8


def settled(rank: int, world: int, cores: list[set[int]]) -> tuple[int, int]:
    """How often lanes settled by waiting for a stream, and for an event that lets threads sleep, in a minibatch."""
    device, spins, sleeps = own_device(rank), list[str](), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        asked = process_ids(world)
        affinity = dict(zip(asked, cores, strict=True))
        patch.setattr(os, "sched_getaffinity", lambda process: affinity[process or os.getpid()])
        model: Any = fully_shard(nn.Linear(64, 64).to(device), mesh=init_device_mesh("cuda", (world,)))
        with model.minibatch():
            model(torch.ones(2, 64, device=device)).sum().backward()
        wait, stream_wait = torch.cuda.Event.synchronize, torch.cuda.Stream.synchronize
        patch.setattr(torch.cuda.Event, "synchronize", lambda self: (sleeps.append(caller()), wait(self)))
        patch.setattr(torch.cuda.Stream, "synchronize", lambda self: (spins.append(caller()), stream_wait(self)))
        with model.minibatch():
            model(torch.ones(2, 64, device=device)).sum().backward()
    for root in live_roots():
        root.shut_down()
    return spins.count("CudaLanes.settle"), sleeps.count("CudaLanes.settle")


def caller() -> str:
    return sys._getframe(2).f_code.co_qualname


def process_ids(world: int) -> list[int]:
    """Of all ranks."""
    found: list[Any] = [None] * world
    dist.all_gather_object(found, os.getpid())
    return found


@pytest.mark.parametrize(
    ("cores", "few"),
    [([set(range(5))] * 2, True), ([set(range(6))] * 2, False), ([{0, 1, 2}, {3, 4, 5}], False)],
    ids=["too few", "shared", "bound"],
)
def test_threads_sleep_where_they_are_more_than_cores(ranks: Any, cores: list[set[int]], few: bool) -> None:
    for spins, sleeps in ranks(2).run(settled, cores, timeout=240):
        assert sleeps > 2 if few else spins > 2
        assert not (spins if few else sleeps)


@on_ranks(2)
def test_the_daemon_goes_on_while_the_memory_of_a_deleted_model_waits_for_the_device(rank: int, world: int) -> None:
    """Of which another model may ask for any amount of work."""
    gc.collect()  # what other tests have left
    device, mesh = own_device(rank), init_device_mesh("cuda", (world,))
    models: list[Any] = [fully_shard(nn.Linear(64, 64).to(device), mesh=mesh) for _ in range(2)]
    for number in range(2):
        with models[number].minibatch():
            models[number](torch.ones(2, 64, device=device)).sum().backward()
    address, asked, idle = daemon(rank).address, list[str](), threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        synchronize = torch.cuda.synchronize

        def busy(device: torch.device | None = None) -> None:
            asked.append(threading.current_thread().name)
            idle.wait(120)
            synchronize(device)

        patch.setattr(torch.cuda, "synchronize", busy)
        models.pop()
        collecting = threading.Thread(target=gc.collect)
        collecting.start()
        try:
            until(lambda: bool(asked))
            assert len(ask(address, {"op": "status"}, 60.0).reply["roots"]) == 1
            with models[0].minibatch():
                models[0](torch.ones(2, 64, device=device)).sum().backward()
        finally:
            idle.set()
        collecting.join(120)
        for root in live_roots():
            root.shut_down()()
    assert asked and "odc-server" not in asked, asked


def mappings() -> int:
    """Device memory that this process has mapped for heaps."""
    return sum(isinstance(one, AtAddress) for one in gc.get_objects())


@on_ranks(2)
def test_a_model_that_has_left_keeps_no_memory_mapped(rank: int, world: int) -> None:
    """Neither its rank's nor that of peers to which it has pushed; a thread of odc's own unmaps it."""
    gc.collect()  # what other tests have left
    device, before, unmapped = own_device(rank), mappings(), list[str]()
    model: Any = fully_shard(nn.Linear(64, 64).to(device), mesh=init_device_mesh("cuda", (world,)))
    with model.minibatch():
        model(torch.ones(2, 64, device=device)).sum().backward()
    assert mappings() == before + world
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        unmap = driver_memory.call

        def noted(function: str, *args: object) -> Any:
            unmapped.extend([threading.current_thread().name] if function == "cuMemUnmap" else [])
            return unmap(function, *args)

        patch.setattr(driver_memory, "call", noted)
        for wait in [root.shut_down() for root in live_roots()]:
            wait()
    assert mappings() == before
    assert unmapped == ["odc-close"] * world
    with pytest.raises(OdcError, match="this model has left the job"):
        model(torch.ones(2, 64, device=device))


def flushes(rank: int, world: int) -> bool:
    device = own_device(rank)
    if device_links.flushes_writes(device):
        return on_a_thread(lambda: device_links.flush_writes(device)) == [None]
    return False


@pytest.mark.parametrize(("order", "flushed"), [("0", True), ("100", True), ("200", False)])
def test_the_driver_says_whether_writes_of_network_cards_are_flushed(order: str, flushed: bool) -> None:
    """A thread that has not called CUDA yet flushes as well."""
    if not CUDA:
        pytest.skip("no emulated CUDA device: a real one is asked as it is")
    pool = RankPool(1, (("EMULATED_RDMA_ORDERING", order),))
    try:
        assert pool.run(flushes, timeout=120) == [flushed]
    finally:
        pool.close()
