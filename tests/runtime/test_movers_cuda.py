"""How a unit is put together from pieces, on tensors of the CPU: copies by the driver are stood for by memmove."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odc.errors import OdcError
from odc.runtime.movers import cpu as cpu_mover
from odc.runtime.movers import cuda as cuda_mover
from odc.runtime.movers.choice import mover_for
from odc.settings import Settings

SHARDS = 3
pieces = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.bfloat16])), min_size=1, max_size=6
)


@given(pieces, st.sampled_from([1, 64, 1 << 30]))
def test_a_unit_is_the_same_whatever_copies_its_pieces(sizes: list[tuple[int, torch.dtype]], boundary: int) -> None:
    offsets, end = [], 0
    for numel, dtype in sizes:
        offsets.append(end)
        end += -(-numel * dtype.itemsize // 16) * 16
    memory = [torch.randint(0, 255, (max(end, 16),), dtype=torch.uint8) for _ in range(SHARDS)]
    found, expected = ([torch.zeros(SHARDS * numel, dtype=dtype) for numel, dtype in sizes] for _ in range(2))
    copied: list[int] = []

    def copy(target: int, source: int, nbytes: int) -> None:
        copied.append(nbytes)
        ctypes.memmove(target, source, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_mover, "COPY_ENGINE_BYTES", boundary)
        patch.setattr(cuda_mover, "copy", copy)
        cuda_mover.gather(found, offsets, SHARDS, [(2, memory[2]), (0, memory[0]), (1, memory[1])])
    cpu_mover.gather(expected, offsets, SHARDS, list(enumerate(memory)))
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    assert all(nbytes >= boundary for nbytes in copied)
    large = [numel * dtype.itemsize for numel, dtype in sizes if numel * dtype.itemsize >= boundary]
    assert len(copied) == SHARDS * len(large)


def test_autograd_does_not_notice_a_parameter_filled_again() -> None:
    """FSDP frees and refills parameters that the graph has saved: a version that moved is an error in backward."""
    memory = [torch.full((4,), 2.0).view(torch.uint8) for _ in range(2)]
    storage = torch.zeros(8)
    parameter = torch.nn.Parameter(storage.view(2, 4))
    x = torch.ones(4, requires_grad=True)

    def fill() -> None:
        cuda_mover.gather([storage], [0], 2, list(enumerate(memory)))

    fill()
    loss = (parameter @ x).sum()
    storage.untyped_storage().resize_(0)
    storage.untyped_storage().resize_(32)
    fill()
    loss.backward()
    assert x.grad is not None and x.grad.tolist() == [4.0] * 4


def test_the_device_decides_what_moves_data() -> None:
    assert mover_for(Settings(), torch.device("cpu")) is cpu_mover
    assert mover_for(Settings(), torch.device("cuda", 1)) is cuda_mover


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_a_copy_is_an_error_and_no_crash() -> None:
    with pytest.raises(OSError, match=r"libcuda\.so\.1"):
        cuda_mover.copy(0, 0, 1)


@pytest.mark.parametrize(("codes", "queries", "refused"), [([0], 0, ""), ([201, 0], 1, ""), ([201, 201], 1, "201")])
def test_a_thread_without_a_context_gets_one(
    codes: list[int], queries: int, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queried: list[int] = []
    stream = SimpleNamespace(cuda_stream=5, query=lambda: queried.append(1))
    answers = iter(codes)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(cuda_mover, "_copy_function", lambda: lambda *_: next(answers))
    with pytest.raises(OdcError, match=f"CUDA error {refused}") if refused else nullcontext():
        cuda_mover.copy(1, 2, 3)
    assert len(queried) == queries and not list(answers)
