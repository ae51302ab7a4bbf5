"""What ranks of an evaluation send each other: it comes back as it was, and reading it runs nothing."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.together import RANKS, run_together

from odc.errors import ResultsError
from odc.eval import Peers, gather_results, plain

KEYS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.tuples(st.integers(), st.text()))
VALUES = st.recursive(
    st.one_of(KEYS, st.floats(allow_nan=False), st.complex_numbers(allow_nan=False), st.frozensets(KEYS)),
    lambda inner: st.one_of(st.lists(inner), st.tuples(inner, inner), st.dictionaries(KEYS, inner)),
    max_leaves=12,
)


def sent(value: Any) -> Any:
    """The value once it has been sent."""
    (found,) = plain.loads(plain.dumps([value], "it"), "it")
    return found


def same(left: Any, right: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    return bool(left == right)


@given(VALUES)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert same(sent(value), value)


def test_floats_that_are_no_numbers_come_back() -> None:
    found = sent([math.nan, math.inf, -math.inf, -0.0])
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf, 0.0] and math.copysign(1, found[3]) == -1


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1), np.float64(0.1), np.int64(-3), np.bool_(True), np.str_("word"), np.longdouble(2),
        np.arange(6, dtype=np.int16).reshape(2, 3).T, np.array(["a", "bcd"]), np.zeros((0, 3)), np.array(2.5),
        np.array(b"ab"), np.array(2j),
    ],
)  # fmt: skip
def test_numpy_comes_back(value: Any) -> None:
    found = sent(value)
    assert type(found) is type(value)
    assert found.dtype == value.dtype and found.shape == value.shape
    assert np.array_equal(found, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_tensors_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (
        torch.arange(math.prod(shape)).reshape(shape).to(dtype).t()
        if len(shape) == 2
        else torch.ones(shape, dtype=dtype)
    )
    found = sent(value)
    assert found.dtype == dtype and found.shape == value.shape
    assert torch.equal(found.float(), value.float())


def test_of_a_view_only_its_own_elements_are_sent() -> None:
    whole = torch.zeros(1000, 1000, requires_grad=True)
    message = plain.dumps([whole[3], 2 * whole[4:5]], "it")
    assert len(message) < 20_000
    assert [tuple(one.shape) for one in plain.loads(message, "it")] == [(1000,), (1, 1000)]


@dataclasses.dataclass
class Score:
    value: float


class Number(int):
    """Must not come back as another type in silence."""


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ([{"score": Score(1.0)}], r"test_plain\.Score"),
        (Path("a"), "pathlib"),
        ((Number(3),), r"test_plain\.Number"),
        (OrderedDict(a=1), r"collections\.OrderedDict"),
        (np.array([object()]), "numpy.ndarray of object"),
        (torch.zeros(2, device="meta"), "torch.Tensor .* on meta"),
        (torch.nn.Parameter(torch.zeros(2)), r"torch\.nn\.parameter\.Parameter"),
        (print, "builtin_function_or_method"),
    ],
)
def test_other_types_are_refused_by_name(value: Any, name: str) -> None:
    with pytest.raises(
        ResultsError, match=f"rank 3: one of the rows holds a value of type .*{name}.* send plain values"
    ):
        plain.dumps([value], "rank 3: one of the rows")


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ResultsError, match="nested too deeply or contains itself"):
        plain.dumps([value], "it")


SPRUNG: list[int] = []


def spring() -> None:
    SPRUNG.append(1)


class Trap:
    """Unpickled, it leaves a mark."""

    def __reduce__(self) -> Any:
        return spring, ()


@pytest.mark.parametrize(
    "planted", [b"x", b"\x80", b"[" * 100_000, pickle.dumps(Trap()), pickle.dumps((0, 1, Trap()), 2)]
)
def test_what_odc_did_not_write_is_not_opened(planted: bytes) -> None:
    """Any local user can write into the store of a job: it takes no password."""
    store = dist.HashStore()
    for key in ("data/1-0/0", "data/0-1/0"):
        store.set(key, b"." + planted)
    calls = [
        lambda: gather_results([], [], Peers(store, RANKS[:2], 0, 20.0)),
        lambda: Peers(store, RANKS[:2], 1, 20.0).exchange(1, "numbers"),
    ]
    for call in calls:
        with pytest.raises(ResultsError, match="cannot be read"):
            call()
    assert SPRUNG == []


def test_a_row_that_cannot_be_sent_ends_the_gathering_on_every_rank() -> None:
    def gather(peers: Peers) -> Any:
        return gather_results([Score(0.5)] if peers.me else [], [7] if peers.me else [], peers, what="scores")

    first, second = run_together(2, gather)
    assert isinstance(second, ResultsError)
    assert str(second).startswith("rank 7: one of the scores holds a value of type ")
    assert f"{Score.__module__}.Score" in str(second)
    assert f"{Score.__module__}.Score" in str(first) and first.culprit == RANKS[1]
