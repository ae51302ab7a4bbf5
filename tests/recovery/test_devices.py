"""What recovery does about GPUs, as far as it shows without one. Jobs on a GPU, or an emulated one: tests/gpu."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.silent import SilentStore
from torch import nn

import odc
from odc.errors import HeapMemoryError, OdcError, PeerLostError, UnsupportedError
from odc.fsdp import rejoin
from odc.memory import pinned
from odc.memory.driver_calls import DriverError
from odc.recovery import losses, process_group
from odc.recovery.devices import is_of_device, refuse_devices
from odc.recovery.generations import GenerationOver, Generations
from odc.recovery.members import Share
from odc.recovery.process_group import GenerationGroup
from odc.recovery.recovery import Recovery
from odc.recovery.slots import Slots

STORES: Any = dist


class Result(IntEnum):
    """Of a call of CUDA's driver."""

    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


@pytest.fixture
def recovery(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recovery]:
    """Of one rank, with a model; to it, every error looks as if another rank had ended."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("TORCH_GLOO_LAZY_INIT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(losses, "loss_shows", lambda generations: True)
    with odc.Recovery(STORES.HashStore(), rejoin_s=5.0) as found:
        model: Any = odc.fully_shard(nn.Linear(4, 4))
        found.protect(model, torch.optim.SGD(model.parameters(), lr=0.1))
        yield found
    odc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: unspecified launch failure"),
        torch.AcceleratorError("the device was lost"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        DriverError("cuMemsetD32Async", Result.CUDA_ERROR_ILLEGAL_ADDRESS),
    ],
)
def test_an_error_of_the_device_leaves_the_step_even_if_a_rank_is_lost(recovery: Recovery, error: Exception) -> None:
    with pytest.raises(type(error), match=re.escape(str(error))), recovery.attempt():
        raise error
    with pytest.raises(PeerLostError, match="gone"), recovery.attempt():
        raise PeerLostError("rank 1 is gone", culprit=1) from error
    assert (recovery.recoveries, recovery.generation) == (0, 0)


def test_another_error_of_torch_is_a_loss_there(recovery: Recovery) -> None:
    with recovery.attempt():
        raise RuntimeError("Connection closed by peer")
    assert (recovery.recoveries, recovery.generation) == (1, 1)
    assert not is_of_device(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not is_of_device(DriverError("cuMemCreate", Result.CUDA_ERROR_OUT_OF_MEMORY))


def test_any_error_after_an_aborted_collective_is_a_loss(recovery: Recovery) -> None:
    """NCCL has been made to end the collective, which has brought anything."""
    with pytest.raises(IndexError), recovery.attempt():
        raise IndexError("gathered lengths")
    recovery._group.cut_short = True
    with recovery.attempt():
        raise IndexError("gathered lengths")
    assert (recovery.recoveries, recovery.generation) == (1, 1)


def test_no_root_ends_while_a_collective_may_wait_for_the_lost_rank(
    recovery: Recovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's kernel would keep the device from ever being done with a heap, and `shutdown` with it."""
    order, shutdown = list[str](), rejoin.shutdown
    monkeypatch.setattr(rejoin._torch_groups, "abort_nccl", lambda: order.append("collectives"))
    monkeypatch.setattr(rejoin, "shutdown", lambda: (order.append("roots"), shutdown()))
    with recovery.attempt():
        raise RuntimeError("Connection closed by peer")
    assert order == ["collectives", "roots"]


@pytest.mark.parametrize("aborted", [False, True])
def test_a_silent_store_does_not_hold_up_the_search_for_a_loss(monkeypatch: pytest.MonkeyPatch, aborted: bool) -> None:
    monkeypatch.setattr(losses, "LOSS_SHOWS_S", 600.0 if aborted else 0.1)
    calls = list[int]()

    class Silent:
        def culprit(self, watch: Callable[[], object]) -> None:
            if aborted:
                monkeypatch.setattr(losses, "aborted_by_another", lambda: True)
            while True:
                calls.append(1)
                watch()

    monkeypatch.setattr(losses, "aborted_by_another", lambda: False)
    assert losses.loss_shows(Silent()) == aborted and calls  # type: ignore[arg-type]


def test_a_model_is_where_the_process_group_reaches_it() -> None:
    refuse_devices(nn.Linear(2, 2), None)
    refuse_devices(nn.Linear(2, 2, device="meta"), torch.device("meta"))
    with pytest.raises(UnsupportedError, match=r"weight is on meta.*when no GPU was in use: call torch\.cuda\.set_dev"):
        refuse_devices(nn.Linear(2, 2, device="meta"), None)
    refuse_devices(nn.Linear(2, 2), None, fewer=True)
    with pytest.raises(UnsupportedError, match="fewest=.* is for models on the CPU so far, and weight is on meta"):
        refuse_devices(nn.Linear(2, 2, device="meta"), torch.device("meta"), fewer=True)
    with pytest.raises(UnsupportedError, match="when cuda:1 was current"):
        refuse_devices(nn.Linear(2, 2, device="meta"), torch.device("cuda", 1))


class Collectives:
    """In the place of NCCL: collectives that wait until they are aborted. `order` is what happened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost: int | None = None
        self.refused: OdcError | None = None  # the store's answer
        self.others_have_ended = False
        self.aborted, self.order = threading.Event(), list[str]()
        self.group: GenerationGroup | None = None
        monkeypatch.setattr(process_group, "abort_nccl", self.abort)
        monkeypatch.setattr(process_group, "aborted_by_another", lambda: self.others_have_ended)
        monkeypatch.setattr(process_group, "NCCL_POLL_S", 0.001)

    def culprit(self, watch: Callable[[], object] = lambda: None) -> int | None:
        self.order.append("asked")
        if self.refused is not None:
            raise self.refused
        return self.lost

    def abort(self) -> None:
        assert self.group is not None
        with pytest.raises(GenerationOver):
            self.group.settle([])
        self.order.append("aborted")
        self.aborted.set()

    def asked(self, times: int) -> None:
        before = self.order.count("asked")
        while self.order.count("asked") < before + times:
            threading.Event().wait(0.001)


def test_collectives_end_when_a_rank_is_lost_and_nothing_is_kept_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the abort on: what a step has left in the tensors does not show it."""
    nccl = Collectives(monkeypatch)
    ranks: Any = nccl
    nccl.group = group = GenerationGroup(ranks, nccl=True)
    nccl.asked(3)
    group.settle([torch.ones(1)])
    nccl.lost = 1
    assert nccl.aborted.wait(60), "the collective waits for ever"
    with pytest.raises(GenerationOver):
        group.settle([torch.ones(1)])
    group.close()
    assert nccl.order[-2:] == ["asked", "aborted"]


def test_collectives_end_where_the_store_has_gone_with_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = Collectives(monkeypatch)
    ranks: Any = nccl
    nccl.refused = PeerLostError("the store is gone")
    nccl.group = group = GenerationGroup(ranks, nccl=True)
    nccl.asked(3)
    assert not nccl.aborted.is_set()
    nccl.others_have_ended = True
    assert nccl.aborted.wait(60), "the collective waits for ever"
    group.close()


@pytest.mark.parametrize("ends", ["an abort", "a generation that is left"])
def test_no_silent_store_holds_up_the_end_of_collectives(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """As where the host of the store is cut off: this rank knows that before the call of the store ends."""
    nccl, store, watching = Collectives(monkeypatch), SilentStore(silent=False), threading.enumerate()
    nccl.group = group = GenerationGroup(Generations(store, 0, 2, 600.0), nccl=True)
    (thread,) = (one for one in set(threading.enumerate()) - set(watching) if one.name == "odc-nccl")
    store.silent = True
    assert store.asked.wait(60)
    if ends == "an abort":
        nccl.others_have_ended = True
        assert nccl.aborted.wait(60), "the collective waits for ever"
    group.close()
    thread.join(60)
    assert not thread.is_alive()
    assert nccl.aborted.is_set() == (ends == "an abort")
    store.silent = False


def test_a_generation_that_was_left_aborts_no_collective_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = Collectives(monkeypatch)
    ranks: Any = nccl
    watching = threading.enumerate()
    nccl.group = group = GenerationGroup(ranks, nccl=True)
    (thread,) = set(threading.enumerate()) - set(watching)
    nccl.asked(1)
    group.close()
    nccl.lost = 1
    thread.join(60)
    assert not thread.is_alive()
    assert not nccl.aborted.is_set()


def test_without_nccl_no_thread_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    before, ranks = threading.active_count(), Collectives(monkeypatch)
    GenerationGroup(ranks, nccl=False).close()  # type: ignore[arg-type]
    assert threading.active_count() == before
    assert not ranks.order


class CudaError(Enum):
    """As torch's binding has it: numbers of CUDA's runtime, which it takes as nothing else."""

    success = 0
    errorMemoryAllocation = 2

    def __int__(self) -> int:
        return self.value


class Driver:
    """CUDA's registry of pinned memory: bytes by address."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.error = CudaError.success

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> CudaError:
        assert address not in self.pinned, "CUDA refuses what is pinned already"
        if self.error is CudaError.success:
            self.pinned[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> CudaError:
        mapped = [line.split("-")[0] for line in Path("/proc/self/maps").read_text().splitlines()]
        assert f"{address:x}" in mapped, "CUDA would unpin pages that are gone"
        del self.pinned[address]
        return CudaError.success

    def cudaGetErrorString(self, code: CudaError) -> str:
        if not isinstance(code, CudaError):
            raise TypeError("cudaGetErrorString(): incompatible function arguments")
        return "out of memory"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(pinned, "_cuda", lambda: made)
    return made


def pinned_slots(nbytes: int) -> Slots:
    slots = Slots.create(Share(0, 0))
    for slot in slots._slots:
        slot.grow(nbytes)
        slot.pin()
        slot.pin()  # each time that it is filled
    return slots


@pytest.mark.parametrize("end", ["close", "drop"])
def test_slots_are_pinned_as_a_whole_and_unpinned_before_they_are_unmapped(driver: Driver, end: str) -> None:
    slots: Slots | None = pinned_slots(1 << 20)
    assert slots is not None
    assert sorted(driver.pinned.values()) == [1 << 20] * 2
    slots._slots[0].grow(1 << 21)
    assert sorted(driver.pinned.values()) == [1 << 20], "the mapping that is too small goes"
    slots._slots[0].pin()
    assert sorted(driver.pinned.values()) == [1 << 20, 1 << 21]
    if end == "close":
        slots.close()
    slots = None
    assert not driver.pinned


def test_a_forked_child_unpins_nothing(driver: Driver) -> None:
    """A worker of a data loader lets go of its parent's slots, and CUDA refuses every call there."""
    slots = pinned_slots(1 << 20)
    child = os.fork()
    if not child:
        os._exit(0 if len(driver.pinned) == 2 and slots.fds == [-1, -1] else 1)
    assert os.waitpid(child, 0)[1] == 0
    slots.close()
    assert not driver.pinned


def test_memory_that_cuda_does_not_pin_is_named(driver: Driver) -> None:
    driver.error = CudaError.errorMemoryAllocation
    with pytest.raises(HeapMemoryError, match=r"does not pin 1\.0 MiB of host memory.*error 2.*out of memory"):
        pinned_slots(1 << 20)


class OnDevice(torch.Tensor):
    """Stands in for a tensor on a device."""

    is_cuda = True


def test_a_state_that_cannot_be_pinned_takes_the_place_of_none(driver: Driver) -> None:
    slots = Slots.create(Share(0, 0))
    for step in range(2):
        slots.write(step, [torch.ones(100)], b"text")
    driver.error = CudaError.errorMemoryAllocation
    with pytest.raises(HeapMemoryError):
        slots.write(2, [torch.ones(100).as_subclass(OnDevice)], b"text")
    assert slots.steps() == [0, 1]


def test_a_state_on_the_cpu_pins_nothing(driver: Driver) -> None:
    slots = Slots.create(Share(0, 0))
    slots.write(0, [torch.ones(100)], b"text")
    assert not driver.pinned
    assert os.fstat(slots.fds[0]).st_size > 0
