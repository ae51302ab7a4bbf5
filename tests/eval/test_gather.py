from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import up_to
from support.together import RANKS, run_together

from odc.errors import PeerLostError, ResultsError
from odc.eval import Peers, gather_metrics, gather_results

KEYS = st.one_of(
    st.lists(st.integers(-50, 50), unique=True, max_size=40),
    st.lists(st.tuples(st.sampled_from(["arc", "gsm"]), st.integers(0, 9)), unique=True, max_size=20),
)


def row(key: Any) -> dict[str, Any]:
    return {"key": key, "text": f"answer to {key}"}


@settings(max_examples=up_to(30))
@given(KEYS, st.integers(1, 4), st.integers(0, 3), st.sampled_from([1, 200, 1 << 18]))
def test_any_deal_comes_back_in_order(keys, world, seed, chunk_bytes):
    draw = random.Random(seed)
    dealt: list[list[Any]] = [[] for _ in range(world)]
    for key in draw.sample(keys, len(keys)):
        draw.choice(dealt).append(key)

    def gather(peers: Peers) -> Any:
        mine = dealt[peers.me]
        rows = [row(key) for key in mine]
        return gather_results(rows, mine, peers, expected=draw.sample(keys, len(keys)), chunk_bytes=chunk_bytes)

    first, *others = run_together(world, gather)
    assert first == [row(key) for key in sorted(keys)]
    assert others == [None] * (world - 1)


def test_seven_samples_on_three_ranks_are_interleaved_again():
    def gather(peers: Peers) -> Any:
        mine = list(range(peers.me, 7, 3))
        return gather_results(mine, mine, peers, expected=7)

    assert run_together(3, gather)[0] == [0, 1, 2, 3, 4, 5, 6]


def test_rows_larger_than_a_chunk_and_a_piece():
    def gather(peers: Peers) -> Any:
        mine = [peers.me, peers.me + 2]
        return gather_results([bytes([key]) * (3 << 20) for key in mine], mine, peers, chunk_bytes=1000)

    first = run_together(2, gather)[0]
    assert [(len(one), one[0]) for one in first] == [(3 << 20, key) for key in range(4)]


def test_into_takes_rows_in_order_and_no_list_is_made():
    taken: list[int] = []

    def gather(peers: Peers) -> Any:
        mine = list(range(peers.me, 50, 4))
        return gather_results(mine, mine, peers, into=taken.append)

    assert run_together(4, gather) == [None] * 4
    assert taken == list(range(50))


@pytest.mark.parametrize(
    ("dealt", "expected", "message"),
    [
        ([[0, 1], [1, 2]], None, "1 doubled: 1 from ranks 4 and 7"),
        ([[0, 0], [1]], None, "1 doubled: 0 from ranks 4 and 4"),
        ([[0], [3]], 6, "4 missing: 1, 2, 4, 5"),
        ([[], []], 2, "2 missing: 0, 1"),
        ([[0, 5], [1]], 2, "1 not expected: 5 from rank 4"),
        ([[0], [2]], [0, 1], "1 missing: 1; 1 not expected: 2 from rank 7"),
        ([list(range(20)), list(range(20))], None, "20 doubled: 0 from ranks 4 and 7, 1 from .*, \\.\\.\\."),
    ],
)
def test_what_does_not_fit_is_named(dealt: list[list[int]], expected: Any, message: str):
    def gather(peers: Peers) -> Any:
        return gather_results(dealt[peers.me], dealt[peers.me], peers, expected=expected, what="samples")

    first, other = run_together(2, gather)
    assert isinstance(first, ResultsError) and isinstance(first, ValueError)
    with pytest.raises(ResultsError, match=f"samples of ranks 4, 7 do not fit: {message}$"):
        raise first
    assert isinstance(other, PeerLostError) and other.culprit == RANKS[0]


def test_missing_ones_may_be_allowed():
    def gather(peers: Peers) -> Any:
        mine = [[0], [3]][peers.me]
        return gather_results(mine, mine, peers, expected=6, allow_missing=True)

    assert run_together(2, gather) == [[0, 3], None]


@pytest.mark.parametrize(
    ("dealt", "message"),
    [
        ([[0, 3], [3]], "1 doubled: 3 from ranks 4 and 7"),
        ([[0], [9]], "1 not expected: 9 from rank 7"),
    ],
)
def test_only_missing_ones_are_allowed(dealt: list[list[int]], message: str):
    def gather(peers: Peers) -> Any:
        return gather_results(dealt[peers.me], dealt[peers.me], peers, expected=6, allow_missing=True)

    first, _ = run_together(2, gather)
    assert isinstance(first, ResultsError), first
    assert str(first).endswith(f"do not fit: {message}")


def test_one_index_a_row():
    def gather(peers: Peers) -> Any:
        return gather_results([1, 2], [1], peers)

    (error,) = run_together(1, gather)
    assert "rank 4: 2 results, but 1 indices" in str(error)


def test_ragged_metrics():
    """Ranks have other metrics, and other numbers of scores of the same one."""
    acc, length = ("arc", "acc", "none"), ("arc", "length", None)
    mine: list[dict[Any, Any]] = [
        {acc: [(3, 0.0), (0, 1.0)]},
        {length: [(1, 17)], acc: [(1, 1.0)]},
        {},
        {length: iter([(5, 3), (2, 4)])},
    ]
    first, *others = run_together(4, lambda peers: gather_metrics(mine[peers.me], peers))
    assert first == {acc: [(0, 1.0), (1, 1.0), (3, 0.0)], length: [(1, 17), (2, 4), (5, 3)]}
    assert others == [None] * 3


def test_a_score_twice_is_named():
    first, _ = run_together(2, lambda peers: gather_metrics({"acc": [(3, 1.0)]}, peers))
    with pytest.raises(ResultsError, match="scores of ranks 4, 7 do not fit: 1 doubled: 3 of 'acc' from ranks 4 and 7"):
        raise first


def test_how_many_are_expected_may_be_a_number_of_numpy() -> None:
    assert run_together(1, lambda peers: gather_results("ab", [0, 1], peers, expected=np.int64(2))) == [["a", "b"]]


NAN = float("nan")


@pytest.mark.parametrize(
    ("dealt", "expected", "message"),
    [
        ([[NAN, 1.0], [2.0]], None, "rank 4: an index of the results is nan, which does not equal itself"),
        ([[("a", NAN)], []], None, r"rank 4: an index of the results is \('a', nan\), which"),
        ([[0, "a"], []], None, "rank 4: an index of the results does not compare with another: '<' not supported"),
        ([[0], ["a"]], None, "indices of the results do not compare over ranks, or with the expected: '<'"),
        ([["a"], ["b"]], 2, "indices of the results do not compare over ranks, or with the expected: '<'"),
    ],
)
def test_indices_without_an_order_are_refused(dealt: list[list[Any]], expected: Any, message: str) -> None:
    def gather(peers: Peers) -> Any:
        mine = dealt[peers.me]
        return gather_results(mine, mine, peers, expected=expected)

    first, _ = run_together(2, gather)
    with pytest.raises(ResultsError, match=message):
        raise first


def test_what_takes_rows_may_raise_a_type_error() -> None:
    def refuse(row: Any) -> None:
        raise TypeError("not mine")

    (error,) = run_together(1, lambda peers: gather_results("a", [0], peers, into=refuse))
    assert type(error) is TypeError


def test_the_first_ranks_rows_are_as_strict_as_the_others() -> None:
    """Or one rank alone would pass where two do not."""
    (error,) = run_together(1, lambda peers: gather_results([object()], [0], peers))
    with pytest.raises(ResultsError, match="rank 4: one of the results holds a value of type builtins.object"):
        raise error
    weight = torch.ones(2, requires_grad=True)
    ((row,),) = run_together(1, lambda peers: gather_results([2 * weight], [0], peers))
    assert row.grad_fn is None
