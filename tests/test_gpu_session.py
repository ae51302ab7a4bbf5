"""`make test-gpu` must not pass on a machine with a device when nothing ran on it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture
def conftest() -> ModuleType:
    path = Path(__file__).parent / "gpu" / "conftest.py"
    spec = importlib.util.spec_from_file_location("conftest_of_gpu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def session(markexpr: str = "gpu", collected: int = 3, collectonly: bool = False) -> Any:
    option = SimpleNamespace(markexpr=markexpr, collectonly=collectonly)
    return SimpleNamespace(config=SimpleNamespace(option=option), testscollected=collected)


def report(when: str, skipped: bool, *keywords: str) -> Any:
    return SimpleNamespace(when=when, skipped=skipped, keywords=dict.fromkeys(keywords, 1), nodeid="test")


def test_a_device_that_no_test_ran_on_is_a_failure(conftest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    conftest.pytest_runtest_logreport(report("setup", True, "gpu"))
    conftest.pytest_runtest_logreport(report("call", False, "slow"))
    assert "no test ran on it" in conftest.nothing_was_tested(session())
    for other in (session("not slow"), session("not gpu"), session(collected=0), session(collectonly=True)):
        assert conftest.nothing_was_tested(other) == ""
    conftest.pytest_runtest_logreport(report("call", False, "gpu"))
    assert conftest.nothing_was_tested(session()) == ""


def test_a_device_that_torch_does_not_see_is_a_failure(conftest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(conftest, "nvidia_devices", lambda: [Path("/dev/nvidia0")])
    assert "does not see it" in conftest.nothing_was_tested(session())
    monkeypatch.setattr(conftest, "nvidia_devices", list)
    assert conftest.nothing_was_tested(session()) == "", "there is no device: that all skip is right"
