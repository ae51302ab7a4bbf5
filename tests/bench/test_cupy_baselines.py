"""The baselines in CUDA C++: how CuPy is called, by a stand-in for it, and whether the kernel compiles."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import cupy_baselines
from bench.cupy_baselines import GATHER, OPTIONS, THREADS, baselines
from odc.errors import OdcError

COUNT, WORDS = 4, 37


class StandIn:
    """CuPy over the CPU's memory: its kernel copies as the one in C++ does, block after block."""

    int64 = int32 = int

    def __init__(self) -> None:
        self.cuda = SimpleNamespace(runtime=self, ExternalStream=lambda stream: nullcontext())

    def RawKernel(self, code: str, name: str, options: tuple[str, ...]) -> Any:
        assert f"void {name}(" in code

        def run(grid: tuple[int], block: tuple[int], arguments: tuple[int, ...]) -> None:
            assert f"-DTHREADS={block[0]}" in options
            target, owners, words, count = arguments
            addresses = (ctypes.c_uint64 * count).from_address(owners)
            for owner in range(count):
                ctypes.memmove(target + owner * words * 16, addresses[owner], words * 16)

        return run

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert (kind, stream) == (3, 0)
        ctypes.memmove(target, source, nbytes)

    def memcpyPeerAsync(self, target: int, at: int, source: int, there: int, nbytes: int, stream: int) -> None:
        assert (at, there, stream) == (0, 0, 0)
        ctypes.memmove(target, source, nbytes)


def test_every_way_fills_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", StandIn())
    source = torch.arange(COUNT * WORDS * 4, dtype=torch.float32)
    target = torch.zeros_like(source)
    owners = torch.tensor([piece.data_ptr() for piece in source.split(WORDS * 4)])
    ways = baselines(target, source, owners, 32)
    assert len(ways) == 3
    for run in ways.values():
        target.zero_()
        run()
        assert torch.equal(target, source)


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(OdcError, match=r"odc-fsdp\[cupy\]"):
        cupy_baselines.load()


def test_nvrtc_compiles_the_gather() -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda.bindings: make test-torch")
    assert THREADS % 32 == 0
    _, program = nvrtc.nvrtcCreateProgram(GATHER.encode(), b"gather.cu", 0, [], [])
    options = [*(option.encode() for option in OPTIONS), b"-arch=compute_90"]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    assert code == 0, log.decode()
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(program, ptx)
    assert b"ld.global" in ptx and b".v4" in ptx, "16 bytes a load"
