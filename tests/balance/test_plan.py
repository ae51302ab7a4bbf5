"""Plan: its figures by hand, its checks, and the round trip through JSON."""

from __future__ import annotations

import json

import pytest

from odc.balance import Plan
from odc.errors import PlanError

SAMPLE_COSTS = [6.0, 1.0, 1.0, 4.0]


def example() -> Plan:
    return Plan.of([[[0]], [[3], [1, 2]]], SAMPLE_COSTS)


def test_figures_by_hand():
    plan = example()
    assert plan.samples == 4
    assert plan.costs == [[6.0], [4.0, 2.0]]
    assert plan.rank_costs == [6.0, 6.0]
    assert plan.longest == 6.0
    assert plan.stepped == 8.0
    assert plan.bound == 6.0
    assert plan.bubble == 0.0
    assert plan.bubble_per_microbatch == pytest.approx(0.25)
    assert plan.gap == 0.0


def test_uneven_plan_has_a_gap_and_a_bound():
    plan = Plan.of([[[0, 1, 2]], [[3]]], SAMPLE_COSTS)
    assert plan.bubble == pytest.approx(1 - 6 / 8)
    assert plan.gap == pytest.approx(8 / 6 - 1)
    assert plan.bubble_bound == 0.0
    giant = Plan.of([[[0]], [[1]], [[2]]], [9.0, 1.0, 2.0])
    assert giant.bubble == giant.bubble_bound == pytest.approx(1 - 4 / 9)


def test_ranks_without_samples_count_as_idle():
    plan = Plan.of([[[0]], []], [5.0])
    assert plan.bubble == plan.bubble_per_microbatch == plan.bubble_bound == pytest.approx(0.5)


def test_speeds_turn_costs_into_times():
    plan = Plan.of([[[0]], [[3], [1, 2]]], SAMPLE_COSTS, speeds=[2.0, 0.5])
    assert plan.costs == [[3.0], [8.0, 4.0]]
    assert plan.longest == 12.0 and plan.bound == pytest.approx(12 / 2.5)
    assert Plan.from_json(plan.to_json()) == plan
    assert "speed" in str(plan).splitlines()[0] and "0.5" in str(plan).splitlines()[2]
    with pytest.raises(PlanError, match="3 speeds for 2 ranks"):
        Plan.of([[[0]], [[3], [1, 2]]], SAMPLE_COSTS, speeds=[1.0, 1.0, 1.0])


def test_a_bound_of_ones_own():
    assert Plan.of([[[0]], [[3], [1, 2]]], SAMPLE_COSTS, bound=5.0).gap == pytest.approx(0.2)


def test_table_of_many_ranks_shows_the_longest():
    plan = Plan.of([[[r]] for r in range(100)], [float(r + 1) for r in range(100)])
    rows = plan.table(most=3).splitlines()
    assert [row.split()[0] for row in rows[1:4]] == ["97", "98", "99"]
    assert rows[4] == "  and 97 ranks that end sooner"


def test_costs_of_zero_make_no_bubble():
    plan = Plan.of([[[0]], [[1]]], [0.0, 0.0])
    assert (plan.bubble, plan.bubble_per_microbatch, plan.bubble_bound, plan.gap) == (0.0, 0.0, 0.0, 0.0)
    assert "rank" in str(plan)


def test_json_round_trip_is_exact():
    plan = Plan.of([[[0], []], [[2, 1]]], [0.1, 0.2, 1 / 3])
    assert Plan.from_json(plan.to_json()) == plan
    assert set(json.loads(plan.to_json())) == {"ranks", "costs", "bound"}


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "not json",
        '{"ranks": [], "costs": [], "bound": 0}',
        '{"ranks": [[[1e999]]], "costs": [[1]], "bound": 1}',
        '{"ranks": [[[0, 0]]], "costs": [[1]], "bound": 1}',
        '{"ranks": [[[0]]], "costs": [[1, 2]], "bound": 1}',
        '{"ranks": [[[1]]], "costs": [[1]], "bound": 1}',
        '{"ranks": 3, "costs": [[1]], "bound": 1}',
        '{"ranks": [[[0]]], "costs": [[1]], "bound": 1, "speeds": [1, 2]}',
        "[]",
    ],
)
def test_bad_json_is_refused(text: str):
    with pytest.raises(PlanError):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[[0], [1]], [[1, 2, 3]]], "sample 1 is listed twice, again in microbatch 0 of rank 1"),
        ([[[0], [1]], [[3]]], "sample 2 is in no microbatch"),
        ([[[0], [1]], [[2, 3, 4]]], "rank 1, microbatch 0 lists sample 4"),
        ([], "at least one rank"),
    ],
)
def test_invalid_plans_are_refused(ranks: list[list[list[int]]], message: str):
    with pytest.raises(PlanError, match=message):
        Plan.of(ranks, SAMPLE_COSTS)


def test_table_names_every_rank_and_the_bound():
    text = str(example())
    assert len(text.splitlines()) == 2 + 3
    assert "lower bound 6" in text
    assert "25.0% per microbatch" in text
