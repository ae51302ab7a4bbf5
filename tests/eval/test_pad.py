from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.errors import PlanError, ResultsError
from odc.eval import RequestPlan, pad_requests


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
    with pytest.raises(PlanError, match="member 0 has 1 requests of 'x', the plan says 2"):
        pad_requests(["a"], plan, "x")
    padded = pad_requests(["a", "b"], plan, "x")
    with pytest.raises(ResultsError, match="3 requests were run, but there are 2 responses"):
        padded.keep(["A", "B"])
