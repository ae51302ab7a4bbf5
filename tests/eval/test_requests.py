from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.together import run_together

from odc.errors import PeerLostError, PlanError, ResultsError
from odc.eval import Peers, RequestPlan, pad_requests, plan_requests, run_requests

COUNTS = st.integers(1, 6).flatmap(
    lambda world: st.dictionaries(
        st.sampled_from("abc"), st.lists(st.integers(0, 9), min_size=world, max_size=world).map(tuple), min_size=1
    )
)


@given(COUNTS)
def test_padding_evens_the_counts(counts):
    world = len(next(iter(counts.values())))
    plans = [RequestPlan(counts, member) for member in range(world)]
    for kind, by_member in counts.items():
        assert {plan.own(kind) + plan.pads(kind) for plan in plans} == {max(by_member)}
        assert sum(plan.pads(kind) for plan in plans) == world * max(by_member) - sum(by_member)


@pytest.mark.parametrize("counts", [(), (1, -1), (3,)])
def test_counts_that_cannot_be(counts: tuple[int, ...]):
    with pytest.raises(PlanError, match="do not fit member 1"):
        RequestPlan({"x": counts}, 1)


def test_every_rank_learns_all_kinds_also_those_it_lacks():
    mine = [{"generate": 3}, {"score": 2, "generate": 1}, {}]
    plans = run_together(3, lambda peers: plan_requests(mine[peers.me], peers))
    assert [dict(plan.counts) for plan in plans] == [{"generate": (3, 1, 0), "score": (0, 2, 0)}] * 3
    assert list(plans[2].counts) == ["generate", "score"]
    assert [plan.me for plan in plans] == [0, 1, 2]


@dataclass
class Request:
    text: str
    answer: str | None = None
    tries: list[str] = field(default_factory=list)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.sampled_from(["pad", "none"]))
def test_pads_come_last_and_are_dropped(counts, mode):
    for member, count in enumerate(counts):
        plan = RequestPlan({"x": tuple(counts)}, member)
        requests = [f"{member}.{i}" for i in range(count)]
        padded = pad_requests(requests, plan, "x", mode=mode, make_pad=lambda: "made")
        assert padded.requests[:count] == requests
        assert padded.requests[count:] == [requests[-1] if requests else "made"] * plan.pads("x") * (mode == "pad")
        assert padded.is_pad == [i >= count for i in range(len(padded.requests))]
        assert padded.keep([text.upper() for text in padded.requests]) == requests


def test_what_is_written_into_a_copy_is_not_in_the_request():
    padded = pad_requests([Request("a"), Request("b")], RequestPlan({"x": (2, 4)}, 0), "x")
    padded.requests[-1].answer = "wrong"
    assert padded.requests[1].answer is None and padded.requests[1].text == padded.requests[-1].text == "b"


def test_a_rank_without_requests_must_be_able_to_make_one():
    plan = RequestPlan({"score": (0, 3)}, 0)
    with pytest.raises(PlanError, match="member 0 has no request of 'score' to copy, but 3 must be run"):
        pad_requests([], plan, "score")
    assert pad_requests([], plan, "score", mode="none").requests == []
    assert pad_requests([], RequestPlan({"score": (0, 0)}, 0), "score").requests == []


def test_counts_are_checked():
    plan = RequestPlan({"x": (2, 3)}, 0)
    with pytest.raises(PlanError, match="member 0 has 1 requests of 'x', the plan has 2"):
        pad_requests(["a"], plan, "x")
    padded = pad_requests(["a", "b"], plan, "x")
    with pytest.raises(ResultsError, match="3 requests were run, but there are 2 responses"):
        padded.keep(["A", "B"])


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


def test_owners_are_numbers_of_any_kind():
    """As `odc.balance` returns them on one rank, and as a list on the other."""
    kinds: list[Any] = [np.array([1, 0, 1]), [1, 0, 1]]
    answers = run_together(2, lambda peers: run_requests([3, 4, 5], lambda some: some, peers, owners=kinds[peers.me]))
    assert answers == [[3, 4, 5], None]


def test_one_answer_to_each_request():
    def work(peers: Peers) -> Any:
        return run_requests([1, 2, 3, 4], lambda some: some[: 2 - peers.me], peers)

    first, second = run_together(2, work)
    assert isinstance(second, ResultsError) and "2 requests were run, but there are 1 responses" in str(second)
    assert isinstance(first, PeerLostError) and "rank 7 failed in the evaluation: ResultsError" in str(first)


def test_answers_may_come_one_by_one():
    def work(peers: Peers) -> Any:
        return run_requests([1, 2, 3], lambda some: (one + 1 for one in some), peers)

    assert run_together(2, work) == [[2, 3, 4], None]
