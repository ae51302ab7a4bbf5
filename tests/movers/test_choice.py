"""What moves data on a device: kernels, unless none runs there, or the settings ask for torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from support.uninterpreted import run_uninterpreted

from odc.errors import UnsupportedError
from odc.memory import HostLanes
from odc.movers import choice
from odc.movers import cpu as cpu_mover
from odc.movers.choice import mover_for
from odc.movers.cuda import CudaMover
from odc.settings import Settings

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def test_the_device_and_the_settings_decide_what_moves_data(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 1)
    for kernels in ("auto", "torch"):
        assert mover_for(Settings(kernels=kernels), torch.device("cpu")) is cpu_mover  # type: ignore[arg-type]
    assert type(mover_for(Settings(kernels="torch"), cuda)) is CudaMover
    monkeypatch.setattr("odc.movers.choice._kernels_run", lambda device: False)
    assert type(mover_for(Settings(), cuda)) is CudaMover, "torch moves what no kernel can"


@needs_triton
def test_kernels_are_the_default_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odc.movers.choice._failure", lambda device: "")
    choice._kernels_run.cache_clear()
    mover = mover_for(Settings(copy_engine_bytes=77), torch.device("cuda", 0), own=3)
    assert type(mover).__name__ == "CompiledMover" and mover.atomic  # type: ignore[attr-defined]
    assert (mover._own, mover._least) == (3, 77)  # type: ignore[attr-defined]


@needs_triton
def test_kernels_that_cannot_be_built_leave_the_data_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many models there are, one warning; whoever asked for kernels gets an error."""
    tried: list[torch.device] = []

    def fails(device: torch.device) -> None:
        tried.append(device)
        raise RuntimeError("Failed to find C compiler.\nAnd more")

    monkeypatch.setattr("odc.movers.triton.launch_one", fails)
    choice._kernels_run.cache_clear(), choice._failure.cache_clear()
    cuda = torch.device("cuda", 0)
    try:
        for _ in range(2):
            assert type(mover_for(Settings(), cuda)) is CudaMover
        (warning,) = caplog.messages
        assert "torch's take their place: RuntimeError: Failed to find C compiler.; triton builds" in warning
        with pytest.raises(UnsupportedError, match="no kernel runs on cuda:0: RuntimeError: Failed to find C compiler"):
            mover_for(Settings(kernels="triton"), cuda)
        assert tried == [cuda], "once a process"
    finally:
        choice._kernels_run.cache_clear(), choice._failure.cache_clear()


@needs_triton
@pytest.mark.parametrize(
    "full",
    [torch.OutOfMemoryError("full"), RuntimeError("Triton Error [CUDA]: out of memory")],
    ids=["torch", "triton"],
)
def test_a_full_device_says_nothing_of_kernels(
    full: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or the rank would do without them from then on, though there is room later."""

    def fails(*_: object) -> None:
        raise full

    monkeypatch.setattr("odc.movers.triton.launch_one", fails)
    choice._kernels_run.cache_clear(), choice._failure.cache_clear()
    cuda = torch.device("cuda", 0)
    try:
        with pytest.raises(type(full)):
            mover_for(Settings(), cuda)
        monkeypatch.setattr("odc.movers.triton.launch_one", lambda device: None)
        mover = mover_for(Settings(), cuda)
        monkeypatch.setattr(type(mover), "prepare", fails)
        with pytest.raises(type(full)):
            choice.prepare_mover(mover, Settings(), cuda, 1, HostLanes(), [], True)
        assert not caplog.messages
    finally:
        choice._kernels_run.cache_clear(), choice._failure.cache_clear()


@needs_triton
@pytest.mark.parametrize("compiler", [None, "/no/such/compiler"])
def test_a_machine_without_a_compiler_is_found_by_one_launch(compiler: str | None, tmp_path: Path) -> None:
    """By triton's own driver, which it builds when the first kernel is launched."""
    (failure, kind), errors = run_uninterpreted("no_compiler.py", tmp_path, CC=compiler, PATH=str(tmp_path))
    assert ("C compiler" if compiler is None else compiler) in failure
    assert kind == "CudaMover" and "torch's take their place" in errors


def test_settings_refuse_sizes_of_nothing() -> None:
    with pytest.raises(ValueError, match="copy_engine_bytes must be"):
        Settings(copy_engine_bytes=0)
