from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.together import run_together

from odc.errors import PeerLostError, PlanError, ResultsError
from odc.eval import Peers, run_requests


@settings(max_examples=20)
@given(st.integers(0, 12), st.integers(1, 4), st.booleans(), st.data())
def test_answers_are_in_order_and_padding_changes_none(count, world, pad, data):
    owners = data.draw(st.none() | st.lists(st.integers(0, world - 1), min_size=count, max_size=count))
    ran = [0] * world

    def work(peers: Peers) -> Any:
        def run(requests: list[str]) -> list[str]:
            ran[peers.me] += len(requests)
            return [request.upper() for request in requests]

        requests = [f"request {i}" for i in range(count)]
        return run_requests(requests, run, peers, owners=owners, pad=pad, key=str)

    first, *others = run_together(world, work)
    assert first == [f"REQUEST {i}" for i in range(count)]
    assert others == [None] * (world - 1)
    dealt = [i % world for i in range(count)] if owners is None else owners
    counts = [dealt.count(member) for member in range(world)]
    assert ran == ([max(counts)] * world if pad else counts)


@pytest.mark.parametrize(
    ("requests", "options", "message"),
    [
        ([["a"], ["a", "b"]], {}, r"ranks were given different answers.* \(rank 4: 1, rank 7: 2\)"),
        ([["a"], ["b"]], {"key": str}, "ranks were given different"),
        ([["a"], ["a"]], {"owners": [2]}, "owners of answers are not one of 2 members"),
        ([["a"], ["a"]], {"owners": []}, "owners of answers are not one of 2 members"),
    ],
)
def test_ranks_must_agree(requests: list[list[str]], options: dict[str, Any], message: str):
    def work(peers: Peers) -> Any:
        return run_requests(requests[peers.me], lambda some: some, peers, kind="answers", **options)

    errors = run_together(2, work)
    with pytest.raises(PlanError, match=message):
        raise errors[0]
    assert isinstance(errors[1], PlanError | PeerLostError)


def test_one_answer_to_each_request():
    def work(peers: Peers) -> Any:
        return run_requests([1, 2, 3, 4], lambda some: some[: 2 - peers.me], peers)

    first, second = run_together(2, work)
    assert isinstance(second, ResultsError) and "2 requests were run, but there are 1 responses" in str(second)
    assert isinstance(first, PeerLostError) and "rank 7 failed in the evaluation: ResultsError" in str(first)
