"""What is asked of the CUDA driver, by stand-ins for its functions: memmove copies, memset zeroes."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from odc.errors import OdcError
from odc.memory import driver_calls
from odc.movers import driver
from odc.movers.cuda import CudaMover


class Result(IntEnum):
    """As cuda.bindings answers."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_CONTEXT = 201


class StandIn:
    """The driver's two functions and torch's stream: what was asked for, and what is answered."""

    def __init__(self, patch: pytest.MonkeyPatch, codes: list[int], stream: int = 5, batches: bool = True) -> None:
        self.copied: list[tuple[int, ...]] = []
        self.batched: list[list[tuple[int, ...]]] = []
        self.queried, self._codes = 0, codes
        patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=stream, query=self._query))
        patch.setattr(driver_calls, "bindings", lambda: SimpleNamespace(cuMemcpyAsync=self._copy))
        patch.setattr(driver, "_batch_function", lambda: self._batch if batches else None)
        patch.setattr(driver, "_refused", [])
        patch.setattr(torch.cuda, "device_of", nullcontext)

    def _query(self) -> None:
        self.queried += 1

    def _copy(self, *args: int) -> tuple[Result]:
        self.copied.append(args)
        return (Result(self._codes.pop(0) if self._codes else 0),)

    def _batch(self, targets: int, sources: int, sizes: int, count: int, *rest: int) -> int:
        attributes, first, kinds, failed, stream = rest
        message = ctypes.cast(attributes, ctypes.POINTER(driver._Attributes)).contents
        assert (message.order, message.flags, kinds, stream) == (1, 1, 1, 5) and failed
        assert ctypes.c_size_t.from_address(first).value == 0
        columns = [(ctypes.c_uint64 * count).from_address(each) for each in (targets, sources, sizes)]
        self.batched.append(list(zip(*columns, strict=True)))
        return self._codes.pop(0) if self._codes else 0


@pytest.mark.parametrize(("codes", "queries", "refused"), [([0], 0, ""), ([201, 0], 1, ""), ([201, 201], 1, "201")])
def test_a_thread_without_a_context_gets_one(
    codes: list[int], queries: int, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = StandIn(monkeypatch, codes)
    with pytest.raises(OdcError, match=f"CUDA error {refused}") if refused else nullcontext():
        driver.copy(1, 2, 3)
    assert stand_in.queried == queries and not codes


@pytest.mark.parametrize("codes", [[], [201, 0, 201, 0]])
def test_memory_is_zeroed_by_the_driver(codes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it and nothing beside it, four bytes at a time; for no bytes nothing is asked."""
    stand_in, waiting = StandIn(monkeypatch, []), list(codes)

    def memset(target: int, value: int, words: int, stream: int) -> tuple[Result]:
        assert (value, stream) == (0, 5) and words > 0
        code = waiting.pop(0) if waiting else 0
        if not code:
            ctypes.memset(target, 0, 4 * words)
        return (Result(code),)

    monkeypatch.setattr(driver_calls, "bindings", lambda: SimpleNamespace(cuMemsetD32Async=memset))
    totals = [torch.ones(6), torch.ones(4, dtype=torch.float64), torch.ones(0)]
    CudaMover(0, 1).zero([totals[0][1:4], totals[1][:2], totals[2]])
    assert totals[0].tolist() == [1, 0, 0, 0, 1, 1] and totals[1].tolist() == [0, 0, 1, 1]
    assert stand_in.queried == codes.count(201)
    waiting += [201, 201]
    with pytest.raises(OdcError, match="zeroing 24 bytes on the device was refused: .* error 201"):
        CudaMover(0, 1).zero(totals)


THREE = [(10, 1, 5), (20, 2, 6), (30, 3, 7)]  # target, source, bytes


def asks_for(*copies: tuple[int, int, int]) -> None:
    driver.copy_all(*(np.array(column, dtype=np.int64) for column in zip(*copies, strict=True)))


@pytest.mark.parametrize("codes", [[], [201, 0]])
def test_many_copies_are_one_call(codes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch, list(codes))
    asks_for(*THREE)
    assert stand_in.batched[-1] == THREE and len(stand_in.batched) == (len(codes) or 1) and not stand_in.copied
    asks_for(THREE[0])
    assert [copy[:3] for copy in stand_in.copied] == THREE[:1], "one copy needs no batch"


@pytest.mark.parametrize(
    "options", [{"batches": False}, {"codes": [801]}, {"stream": 0}], ids=["old driver", "refused", "default stream"]
)
def test_without_batches_copies_are_asked_for_one_by_one(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in = StandIn(monkeypatch, **{"codes": [], **options})
    for _ in range(2):
        stand_in.copied.clear()
        asks_for(*THREE)
        assert [copy[:3] for copy in stand_in.copied] == THREE
    assert len(stand_in.batched) == len(caplog.messages) == (1 if "codes" in options else 0)
    assert "codes" not in options or "refuses copies in one call (CUDA error 801)" in caplog.text
