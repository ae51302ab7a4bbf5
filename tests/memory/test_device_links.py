"""What is made of the driver's answers about links between devices, with a stand-in for the driver."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odc.errors import UnsupportedError
from odc.memory import device_links
from odc.memory.device_links import atomic_peers, native_atomics
from odc.memory.driver_calls import DriverError

NATIVE = "CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, int, int]]:
    """The driver of three devices, of which 0 and 1 have a link with atomics."""
    found: list[tuple[object, int, int]] = []

    def call(function: str, attribute: object, number: int, other: int) -> int:
        found.append((attribute, number, other))
        return int(2 not in (number, other))

    names = SimpleNamespace(CUdevice_P2PAttribute=SimpleNamespace(**{NATIVE: "native"}))
    monkeypatch.setattr(device_links, "bindings", lambda: names)
    monkeypatch.setattr(device_links, "call", call)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"GPU-{number}"))
    return found


@pytest.mark.parametrize(("device", "reached"), [(0, ["GPU-0", "GPU-1"]), (1, ["GPU-0", "GPU-1"]), (2, ["GPU-2"])])
def test_devices_are_reached_by_atomics_where_the_driver_says_so(
    asked: list[tuple[object, int, int]], device: int, reached: list[str]
) -> None:
    assert atomic_peers(torch.device("cuda", device)) == reached
    assert asked == [("native", device, other) for other in range(3) if other != device], "no link to itself"


def test_no_answer_is_no_atomics(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnsupportedError("no cuda.bindings")

    class Refusal(int):
        name = "CUDA_ERROR_INVALID_DEVICE"

    def refuse(function: str, *args: object) -> None:
        raise DriverError(function, Refusal(101))

    assert native_atomics(0, 1)
    monkeypatch.setattr(device_links, "call", refuse)
    assert not native_atomics(0, 1)
    monkeypatch.setattr(device_links, "bindings", missing)
    assert not native_atomics(0, 1)


class Attributes:
    """The driver of a device with these attributes; `calls` are those that are not about attributes."""

    def __init__(self, order: int, options: int) -> None:
        self.calls, self.asked, self._attributes = list[tuple[object, ...]](), 0, {"order": order, "options": options}

    def bindings(self) -> SimpleNamespace:
        prefix = "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_"
        attributes = {prefix + "WRITES_ORDERING": "order", prefix + "FLUSH_WRITES_OPTIONS": "options"}
        flush = "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_"
        return SimpleNamespace(
            CUdevice_attribute=SimpleNamespace(**attributes),
            CUGPUDirectRDMAWritesOrdering=SimpleNamespace(CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES=200),
            CUflushGPUDirectRDMAWritesOptions=SimpleNamespace(**{flush + "OPTION_HOST": 1}),
            CUflushGPUDirectRDMAWritesTarget=SimpleNamespace(**{flush + "TARGET_CURRENT_CTX": 0}),
            CUflushGPUDirectRDMAWritesScope=SimpleNamespace(**{flush + "TO_ALL_DEVICES": 200}),
        )

    def call(self, function: str, *args: Any) -> Any:
        if function == "cuDeviceGetAttribute":
            assert args[1] == 3
            self.asked += 1
            return self._attributes[args[0]]
        self.calls.append((function, *args))
        return None


@pytest.mark.parametrize(("order", "options", "flushes"), [(0, 1, True), (100, 3, True), (200, 0, False)])
def test_writes_of_network_cards_are_flushed_where_devices_do_not_order_them(
    monkeypatch: pytest.MonkeyPatch, order: int, options: int, flushes: bool
) -> None:
    """Also where only their own device sees them in order: peers read what has come."""
    driver, device = Attributes(order, options), torch.device("cuda", 3)
    monkeypatch.setattr(device_links, "bindings", driver.bindings)
    monkeypatch.setattr(device_links, "call", driver.call)
    device_links.flushes_writes.cache_clear()
    assert device_links.flushes_writes(device) == flushes
    asked = driver.asked
    assert device_links.flushes_writes(device) == flushes and driver.asked == asked, "it is asked once"
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    device_links.flush_writes(device)
    assert driver.calls == [("cuFlushGPUDirectRDMAWrites", 0, 200)]
    device_links.flushes_writes.cache_clear()


def test_a_device_that_can_do_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Attributes(0, 2)
    monkeypatch.setattr(device_links, "bindings", driver.bindings)
    monkeypatch.setattr(device_links, "call", driver.call)
    device_links.flushes_writes.cache_clear()
    with pytest.raises(UnsupportedError, match=r"cuda:3 .*engine='sockets'"):
        device_links.flushes_writes(torch.device("cuda", 3))
