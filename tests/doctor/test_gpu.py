"""What the GPU probes say of installations that are not here; what they say of this one is `odc doctor`'s to show."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odc.doctor import State, gpu


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`installed(triton="3.7.1", ...)`: these packages are, and no others (underscores stand for dashes)."""

    def install(**versions: str) -> None:
        known = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(gpu, "version_of", known.get)

    return install


class FakeDriver:
    """libcuda as ctypes sees it."""

    def __init__(self, code: int, name: bytes = b"", version: int = 13000, devices: int = 1) -> None:
        self._code, self._name, self._version, self._devices = code, name, version, devices

    def cuInit(self, flags: int) -> int:
        return self._code

    def cuGetErrorName(self, code: int, text: Any) -> None:
        text._obj.value = self._name

    def cuDriverGetVersion(self, number: Any) -> None:
        number._obj.value = self._version

    def cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = self._devices


def test_no_driver() -> None:
    (found,) = gpu.driver("libcuda-that-is-nowhere.so.1")
    assert (found.state, found.use) == (State.ABSENT, "cuda")
    assert "libcuda-that-is-nowhere" in found.found


@pytest.mark.parametrize(
    ("driver", "state", "said"),
    [
        (FakeDriver(0, version=13010, devices=8), State.OK, "CUDA 13.1, 8 devices"),
        (FakeDriver(0, devices=0), State.BROKEN, "CUDA_VISIBLE_DEVICES"),
        (FakeDriver(100, b"CUDA_ERROR_NO_DEVICE"), State.BROKEN, "--gpus all"),
        (FakeDriver(803, b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"), State.BROKEN, "reboot"),
        (FakeDriver(999, b"CUDA_ERROR_UNKNOWN"), State.BROKEN, "nvidia-smi"),
    ],
)
def test_drivers(driver: FakeDriver, state: State, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    (found,) = gpu.driver()
    assert found.state is state and said in f"{found.found} {found.do}"


@pytest.mark.parametrize(
    ("cuda", "available", "state", "said"),
    [(None, False, State.ABSENT, "TORCH_INDEX"), ("13.0", False, State.BROKEN, "a driver for CUDA 13.0")],
)
def test_torch_without_devices(
    cuda: str | None, available: bool, state: State, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    (found,) = gpu.torch_cuda()
    assert found.state is state and said in found.do


def test_devices_that_cannot_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="H200"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: 2 not in (i, j))
    monkeypatch.setattr(gpu, "_symmetric", lambda: gpu.ok("symmetric memory", "allocates", "cuda"))
    cards, access, _ = gpu.torch_cuda()
    assert cards.found == "CUDA 13.0: 3 x H200"
    assert access.state is State.BROKEN and "4 of 6 pairs cannot (0-2, 1-2, 2-0, 2-1)" in access.found


@pytest.mark.parametrize(
    ("versions", "pinned", "state", "said"),
    [
        ({}, None, State.ABSENT, "pip install triton"),
        ({"triton": "3.7.1", "numpy": "2.4.6"}, "3.7.1", State.OK, "3.7.1"),
        ({"triton": "3.7.1", "numpy": "2.4.6"}, None, State.OK, "3.7.1"),
        ({"triton": "3.5.1", "numpy": "2.4.6"}, None, State.BROKEN, "triton 3.6 or newer"),
        ({"triton": "3.6.0", "numpy": "2.4.6"}, "3.6.0", State.OK, "3.6.0"),
        ({"triton": "3.9.0", "numpy": "2.4.6"}, "3.7.1", State.BROKEN, "triton==3.7.1"),
    ],
)
def test_triton(
    versions: dict[str, str],
    pinned: str | None,
    state: State,
    said: str,
    installed: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(**versions)
    monkeypatch.setattr(gpu, "_pinned", lambda package, needed: pinned)
    (found,) = gpu.triton()
    assert found.state is state and said in f"{found.found} {found.do}"


def test_pins_are_read_from_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["filelock", 'triton==3.7.1; platform_system == "Linux"', "tritonx==1.0"]
    monkeypatch.setattr(gpu.metadata, "requires", lambda _: lines)
    assert gpu._pinned("torch", "triton") == "3.7.1"
    assert gpu._pinned("torch", "filelock") is None


def test_no_nvshmem(installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    installed()
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    (found,) = gpu.nvshmem()
    assert found.state is State.ABSENT and "nvidia-nvshmem-cu12<3.8" in found.do


def test_nvshmem_for_another_cuda(installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    installed(nvidia_nvshmem_cu12="3.4.5")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (found,) = gpu.nvshmem()
    assert found.state is State.BROKEN and "nvidia-nvshmem-cu13<3.8" in found.do


def test_nvshmem_without_plain_bitcode(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(nvidia_nvshmem_cu13="3.8.0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu, "_file", lambda name, pattern: None)
    library, bitcode, python = gpu.nvshmem()
    assert library.state is bitcode.state is State.BROKEN
    assert "one file for each architecture" in bitcode.found and "<3.8" in bitcode.do
    assert python.state is State.ABSENT and "nvshmem4py-cu13" in python.do


def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libnvshmem_host.so.3").write_bytes(b"not a library")
    monkeypatch.setattr(gpu, "_file", lambda name, pattern: tmp_path / "libnvshmem_host.so.3")
    found = gpu._library("nvidia-nvshmem-cu13", "3.4.5")
    assert found.state is State.BROKEN and "does not load" in found.found
