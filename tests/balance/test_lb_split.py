"""LB-Split: never behind LB-Mini, near the ideal mean where samples are long, and pieces that cover what they cut."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.balance import (
    Plan,
    SplitSample,
    cost_from_config,
    floor_of,
    lb_mini,
    lb_split,
    linear_cost,
    longest_in_pieces,
    longest_piece,
    most_pieces,
    quadratic,
)
from odc.balance.slices import contiguous, costs_of, zigzag
from odc.errors import PlanError
from odc.simulate.catalog import MODELS
from odc.simulate.lengths import NAMED

CAP = 400
LENGTHS = st.lists(st.one_of(st.integers(1, 60), st.integers(1, CAP)), min_size=1, max_size=32)
COSTS = st.sampled_from([linear_cost, quadratic(0.268, 4.05e-3), quadratic(0, 1)])
OPTIONS = st.fixed_dictionaries(
    {
        "node": st.sampled_from([None, 1, 2, 3, 4, 6]),
        "floor": st.sampled_from([1, 8, 50]),
        "wait": st.sampled_from([0.0, 3.0]),
        "one_slice": st.booleans(),
    }
)


@given(LENGTHS, st.integers(1, 9), COSTS, OPTIONS)
def test_valid_never_above_lb_mini_and_by_its_rules(lengths, ranks, cost, options):
    plan = lb_split(lengths, ranks, CAP, cost, **options)
    plan.validate(len(lengths))
    mini = lb_mini(lengths, ranks, CAP, cost)
    assert plan.longest <= mini.longest
    assert plan.longest >= plan.bound * (1 - 1e-9)
    if not plan.splits:
        assert plan == mini
    follows_the_rules(plan, lengths, [CAP] * ranks, options)


@given(st.data(), LENGTHS, st.integers(2, 8), COSTS, OPTIONS)
def test_speeds_caps_and_groups_are_kept(data, lengths, ranks, cost, options):
    speeds = data.draw(st.lists(st.sampled_from([0.5, 0.9, 1.0]), min_size=ranks, max_size=ranks))
    caps = [CAP, *data.draw(st.lists(st.integers(0, CAP), min_size=ranks - 1, max_size=ranks - 1))]
    names = data.draw(st.lists(st.integers(0, 20), min_size=len(lengths), max_size=len(lengths)))
    plan = lb_split(lengths, ranks, caps, cost, speeds=speeds, groups=names, **options)
    plan.validate(len(lengths))
    follows_the_rules(plan, lengths, caps, options)
    assert all(names.count(names[split.sample]) == 1 for split in plan.splits)
    where = {i: rank for rank, microbatches in enumerate(plan.ranks) for mb in microbatches for i in mb}
    assert len({(names[i], where[i]) for i in where}) == len({names[i] for i in where})
    assert plan.longest <= lb_mini(lengths, ranks, caps, cost, speeds=speeds, groups=names).longest * (1 + 1e-9)


# Samples above the cap, which have to be split, and all in one slice where that is asked for.
LONG = st.lists(st.one_of(st.integers(1, 60), st.integers(1, 4 * CAP)), min_size=1, max_size=16)
TIGHT = st.fixed_dictionaries({"one_slice": st.sampled_from([True, True, False]), "floor": st.sampled_from([1, 8])})


@given(st.data(), LONG, st.integers(2, 9), COSTS, OPTIONS, TIGHT, st.booleans())
def test_samples_above_the_cap_keep_it_in_every_piece(data, lengths, ranks, cost, options, tight, alike):
    options, speeds, caps = {**options, **tight}, None, [CAP] * ranks
    if not alike:
        speeds = data.draw(st.lists(st.sampled_from([0.5, 0.9, 1.0]), min_size=ranks, max_size=ranks))
        caps = [CAP, *data.draw(st.lists(st.integers(0, CAP), min_size=ranks - 1, max_size=ranks - 1))]
    try:
        plan = lb_split(lengths, ranks, caps, cost, speeds=speeds, **options)
    except PlanError:
        assert max(lengths) > CAP
        return
    plan.validate(len(lengths))
    follows_the_rules(plan, lengths, caps, options)


def test_a_host_holds_as_many_pieces_as_its_largest_aligned_block_has_ranks():
    assert [most_pieces(ranks) for ranks in range(1, 10)] == [1, 2, 2, 4, 4, 4, 4, 8, 8]
    for node in range(1, 10):
        plan = lb_split([64, 1, 1], node, 64, quadratic(0, 1), floor=1)
        assert max((len(split.ranks) for split in plan.splits), default=1) == most_pieces(node)


@given(st.integers(2, 40), st.sampled_from([1, 3, 4, 7, 8]), st.sampled_from([None, 1, 2, 4]), COSTS, st.data())
def test_all_that_the_pieces_can_hold_is_planned_and_nothing_more(cap, ranks, node, cost, data):
    """Down to the last token: what checks a length before a job must neither pass nor refuse another one."""
    longest = longest_in_pieces(cap, most_pieces(min(node or ranks, ranks)))
    longs = st.lists(st.integers(max(1, longest - 9), longest), min_size=1, max_size=4)
    lengths = [*data.draw(longs), *data.draw(st.lists(st.integers(1, cap)))]
    plan = lb_split(lengths, ranks, cap, cost, node=node)
    plan.validate(len(lengths))
    assert all(max(split.tokens) <= min(cap, longest_piece(split.length)) for split in plan.splits)
    with pytest.raises(PlanError, match="does it fit into the cap"):
        lb_split([longest + 1, *lengths], ranks, cap, cost, node=node)


def test_a_sample_that_fills_its_pieces_to_the_last_tokens():
    plan = lb_split([4003, *[5] * 8], 4, 1001, quadratic(10000, 1))
    assert sorted(plan.splits[0].tokens) == [1000, 1001, 1001, 1001]


def follows_the_rules(plan: Plan, lengths: list[int], caps: list[int], options: dict) -> None:
    node = options["node"] or len(caps)
    for split in plan.splits:
        size, first = len(split.ranks), split.ranks[0]
        assert size & (size - 1) == 0 and split.ranks == list(range(first, first + size))
        assert first // node == split.ranks[-1] // node and first % node % size == 0
        assert split.length == lengths[split.sample]
        assert max(split.tokens) <= min(caps[rank] for rank in split.ranks)
        # A cap outweighs the floor.
        assert split.length >= size * options["floor"] or split.length > max(caps)
    for microbatches, cap in zip(plan.ranks, caps, strict=True):
        assert all(sum(lengths[i] for i in mb) <= cap for mb in microbatches)
    sizes = [len(split.ranks) for split in plan.splits]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("source", ["longalign", "swe-smith"])
@pytest.mark.parametrize(("per_rank", "most"), [(1, 1.10), (2, 1.04), (4, 1.01)])
def test_step_over_the_ideal_mean_on_long_samples(source, per_rank, most):
    cost, draw = cost_from_config(MODELS["qwen2.5-7b"]), np.random.default_rng(5)
    steps, whole = [], []
    for _ in range(16):
        lengths = NAMED[source].draw(8 * per_rank, draw).tolist()
        mean = sum(cost(length) for length in lengths) / 8
        steps.append(lb_split(lengths, 8, 131_072, cost).longest / mean)
        whole.append(lb_mini(lengths, 8, 131_072, cost).longest / mean)
    assert np.mean(steps) <= most, f"{np.mean(steps):.3f}, LB-Mini {np.mean(whole):.3f}"
    assert np.mean(whole) > 1.1, "these lengths show nothing"


def test_a_sample_above_the_cap_is_split_and_short_ones_fill_up():
    plan = lb_split([900, 50, 40], 4, 300, floor=30)
    assert [(split.sample, split.tokens) for split in plan.splits] == [(0, [225, 225, 225, 225])]
    assert plan.longest == 275 and sorted(i for mbs in plan.ranks for mb in mbs for i in mb) == [1, 2]


def test_a_cap_outweighs_the_floor_and_what_fits_nowhere_is_refused():
    assert len(lb_split([900, 50], 4, 300).splits[0].ranks) == 4
    with pytest.raises(PlanError, match="sample 1 has 900 tokens: neither whole nor in 4 pieces .* cap of 200 tokens"):
        lb_split([10, 900], 4, 200)
    with pytest.raises(PlanError, match="in 2 pieces"):
        lb_split([10, 900], 4, 300, node=2)
    with pytest.raises(PlanError, match="floor >= 1"):
        lb_split([10], 4, 300, floor=0)


def test_more_pieces_are_taken_where_no_block_of_fewer_has_room_under_its_smallest_cap():
    """Two pieces of 66 and 67 tokens fit on ranks 1 and 3, which are no neighbours; four pieces fit on ranks 0 to 3."""
    plan = lb_split([133, 28], 6, [66, 132, 66, 132, 0, 33])
    assert [split.ranks for split in plan.splits] == [[0, 1, 2, 3]]
    with pytest.raises(PlanError, match="sample 1 has 900 tokens: neither whole nor in 2 pieces"):
        lb_split([600, 900, 20], 2, [300, 400])


def test_a_sample_above_the_cap_that_shares_its_group_is_refused_before_the_search(monkeypatch):
    search = importlib.import_module("odc.balance.lb_split")._Search
    monkeypatch.setattr(search, "drafts", lambda self, best: pytest.fail("there is nothing to search for"))
    with pytest.raises(PlanError, match="sample 2 has 900 tokens, above the cap of 400; it shares its group with 1 "):
        lb_split([10, 30, 900, 20], 4, [400, 300, 300, 300], groups=["a", "b", "b", "c"])


def test_the_search_ends_where_no_rank_can_hold_a_piece(monkeypatch):
    """Of the pieces of 200 tokens one lies on the rank whose cap is 50, however many other samples are split."""
    search, tried = importlib.import_module("odc.balance.lb_split")._Search, []
    draft = search._draft
    monkeypatch.setattr(search, "_draft", lambda self, pieces: tried.append(pieces) or draft(self, pieces))
    with pytest.raises(PlanError, match="sample 0 has 400 tokens: neither whole nor in 2 pieces"):
        lb_split([400, *range(20, 51)] * 40, 2, [300, 50], floor=1)
    assert len(tried) < 40


def test_samples_that_are_too_short_to_be_split_are_not_tried(monkeypatch):
    """Each try looks at every sample that might be split: of thousands it would take minutes a minibatch."""
    search, tried = importlib.import_module("odc.balance.lb_split")._Search, []
    pieces = search._pieces
    monkeypatch.setattr(
        search, "_pieces", lambda self, groups, most: tried.append(groups) or pieces(self, groups, most)
    )
    lengths = [4000] + [100 + i % 200 for i in range(2000)]  # the longest takes longer than the mean rank
    plan = lb_split(lengths, 512, 4096, quadratic(0, 1))
    assert plan == lb_mini(lengths, 512, 4096, quadratic(0, 1)) and not tried
    lb_split([5000, *lengths], 512, 8192, quadratic(0, 1))
    assert tried and max(map(len, tried)) == 1, "the one that can be split, and none behind it"


def test_contiguous_pieces_of_unequal_length_keep_the_cap():
    """Of two contiguous pieces of equal cost the first holds 342 of the 483 tokens; zig-zag pieces hold half each."""
    assert max(lb_split([483], 2, 301, quadratic(0, 1), floor=1).splits[0].tokens) <= 301
    with pytest.raises(PlanError, match="neither whole nor in 2 pieces"):
        lb_split([483], 2, 301, quadratic(0, 1), floor=1, one_slice=True)


def test_gangs_wait_for_each_other_in_the_plans_figures():
    """Rank 1 holds pieces of both samples: the second starts when the first has ended on all its ranks."""
    splits = [SplitSample(0, [0, 1], zigzag(8, 2), [4.0, 4.0]), SplitSample(1, [1, 2], zigzag(6, 2), [3.0, 3.0])]
    plan = Plan.of([[], [], [[2]]], [8.0, 6.0, 1.0], splits=splits, bound=5.0)
    assert plan.rank_costs == [4.0, 7.0, 4.0]
    assert plan.rank_ends == [4.0, 7.0, 8.0] and plan.longest == 8.0 and plan.stepped == 8.0
    assert plan.samples == 3 and Plan.from_json(plan.to_json()) == plan
    assert "2 samples run first, split into 4 pieces" in plan.table()
    assert plan.bubble == pytest.approx(1 - 5 / 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": [0, 0]}, "two or more different ranks"),
        ({"ranks": [0, 7]}, "there are 3 ranks"),
        ({"costs": [1.0]}, "differ in number"),
        ({"slices": [[(0, 3)], [(4, 8)]]}, "leave out or repeat tokens near 4"),
        ({"slices": [[(6, 8), (0, 2)], [(2, 6)]]}, "rising order"),
        ({"sample": 2}, "listed twice"),
    ],
)
def test_a_plan_with_bad_pieces_is_refused(change, message):
    fields = {"sample": 0, "ranks": [0, 1], "slices": zigzag(8, 2), "costs": [4.0, 4.0], **change}
    with pytest.raises(PlanError, match=message):
        Plan.of([[[2]], [[1]], []], [8.0, 6.0, 1.0], splits=[SplitSample(**fields)])


@given(st.integers(2, 500), st.sampled_from([2, 4, 8]), COSTS)
def test_cuts_cover_every_token_once_and_cost_alike(length, pieces, cost):
    length = max(length, pieces)
    split = SplitSample(0, list(range(pieces)), zigzag(length, pieces), [0.0] * pieces)
    assert set(split.tokens) <= {length // pieces, -(-length // pieces)}
    for slices in (zigzag(length, pieces), contiguous(length, pieces, cost)):
        SplitSample(0, list(range(pieces)), slices, [0.0] * pieces).validate(pieces)
        costs = costs_of(slices, cost)
        assert sum(costs) == pytest.approx(cost(length))
        one_token = cost(length) - cost(length - 1)
        assert max(costs) - min(costs) <= 4 * one_token


def test_zigzag_pieces_cost_the_same_under_any_model():
    slices = zigzag(1 << 12, 4)
    for cost in (linear_cost, quadratic(1, 1), quadratic(0, 3)):
        assert max(costs_of(slices, cost)) <= 1.002 * min(costs_of(slices, cost))
    assert slices[-1] == [(3 * 512, 5 * 512)], "the two in the middle are one"


def test_the_floor_is_where_fetching_takes_as_long_as_computing():
    assert floor_of(400e12, 200e9) == 2000


def test_a_cost_that_falls_is_refused() -> None:
    with pytest.raises(PlanError, match="needs a cost that does not fall"):
        lb_split([400, 37, 64], 4, 250, lambda length: 1000.0 - length if length > 100 else float(length), floor=1)
