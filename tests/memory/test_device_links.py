"""What is made of the driver's answers about links between devices, with a stand-in for the driver."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odc.memory.device_links import adds_atomically, native_atomics


class Driver:
    """libcuda of three devices, of which 0 and 1 have a link with atomics."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def cuDeviceGetP2PAttribute(self, value: Any, attribute: int, number: int, other: int) -> int:
        self.asked.append((number, other))
        value._obj.value = attribute == 3 and 2 not in (number, other)
        return 101 if number == other else 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    one = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: one)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"GPU-{number}"))
    return one


@pytest.mark.parametrize(
    ("others", "atomic"),
    [(["GPU-0", "GPU-1"], True), (["GPU-0"], True), (["GPU-1", "GPU-2"], False), (["GPU-0", "unseen"], False)],
)
def test_every_device_must_be_reached_by_atomics(driver: Driver, others: list[str], atomic: bool) -> None:
    assert adds_atomically(torch.device("cuda", 0), others) == atomic
    assert (0, 0) not in driver.asked, "a device has no link to itself"


def test_no_answer_is_no_atomics(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_atomics(0, 1) and not native_atomics(0, 0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    assert not native_atomics(0, 1), "a driver without that call"
    monkeypatch.undo()
    assert not native_atomics(0, 1, "libcuda-that-is-nowhere.so.1")
