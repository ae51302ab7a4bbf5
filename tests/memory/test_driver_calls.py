"""How the driver is called, with a stand-in for cuda.bindings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace

import pytest
import torch

from odc.errors import UnsupportedError
from odc.memory import driver_calls
from odc.memory.driver_calls import DriverError, bindings, call


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201


OK, FULL, LOST = CUresult


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What the function `cuAsk` answers, one after the other; a thread's context is got by asking for its stream."""
    queue: list[tuple[object, ...]] = []
    monkeypatch.setattr(driver_calls, "bindings", lambda: SimpleNamespace(cuAsk=lambda *args: queue.pop(0)))
    return queue


@pytest.mark.parametrize(("answer", "value"), [((OK,), None), ((OK, 7), 7), ((OK, 7, 8), [7, 8])])
def test_values_come_without_the_result(answers: list[tuple[object, ...]], answer: tuple, value: object) -> None:
    answers.append(answer)
    assert call("cuAsk", 1) == value


def test_a_refusal_has_the_function_and_the_number_in_it(answers: list[tuple[object, ...]]) -> None:
    answers.append((FULL, 0))
    with pytest.raises(DriverError, match=r"^cuAsk: CUDA error 2 \(CUDA_ERROR_OUT_OF_MEMORY\)$") as failure:
        call("cuAsk")
    assert (failure.value.code, failure.value.name) == (2, "CUDA_ERROR_OUT_OF_MEMORY")


@pytest.mark.parametrize("unnamed", [lambda: CUresult(987), lambda: {0: OK}[987]], ids=["as of 13", "as of 12"])
def test_a_number_that_the_bindings_have_no_name_for_is_a_refusal(
    unnamed: Callable[[], CUresult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver may be newer than the bindings, which look the number up before they return."""
    monkeypatch.setattr(driver_calls, "bindings", lambda: SimpleNamespace(cuAsk=lambda: (unnamed(),)))
    with pytest.raises(DriverError, match=r"^cuAsk: CUDA error 987 \(unknown to cuda.bindings\)$"):
        call("cuAsk")


def test_an_argument_that_the_bindings_refuse_is_no_refusal_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_calls, "bindings", lambda: SimpleNamespace(cuAsk=lambda size: (OK, int(size))))
    with pytest.raises(ValueError, match="invalid literal"):
        call("cuAsk", "many")


@pytest.mark.parametrize("second", [OK, LOST])
def test_a_thread_without_a_context_gets_one_and_asks_again(
    answers: list[tuple[object, ...]], second: CUresult, monkeypatch: pytest.MonkeyPatch
) -> None:
    queried: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=lambda: queried.append(1)))
    answers += [(LOST,), (second, 7)]
    if second == OK:
        assert call("cuAsk") == 7
    else:
        with pytest.raises(DriverError, match="201"):
            call("cuAsk")
    assert queried == [1] and not answers


def test_without_cuda_bindings_the_error_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    bindings.cache_clear()
    try:
        with pytest.raises(
            UnsupportedError, match="which a torch that is built for CUDA brings along; pip install cuda"
        ):
            call("cuInit", 0)
    finally:
        bindings.cache_clear()
