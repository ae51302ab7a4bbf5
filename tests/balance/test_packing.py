"""Packing under the cap against HiGHS on small instances."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from support.highs import fewest_bins

from odc.balance.packing import best_fit_decreasing, fewest_possible, pack, pack_evenly

CAP = 20
LENGTHS = st.lists(st.integers(1, CAP), min_size=1, max_size=40)


@given(LENGTHS)
def test_best_fit_decreasing_is_valid(lengths: list[int]):
    bins = best_fit_decreasing(lengths, range(len(lengths)), CAP)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(b and sum(lengths[i] for i in b) <= CAP for b in bins)


def instances(count: int) -> list[tuple[list[int], int]]:
    draw = random.Random(5)
    made = []
    for number in range(count):
        samples, cap = draw.randint(6, 14), draw.choice([20, 100, 1000])
        least = (1, cap // 10, cap // 5, cap // 4)[number % 4]
        made.append(([draw.randint(max(1, least), (cap, cap // 2)[number % 2]) for _ in range(samples)], cap))
    return made


def test_two_hundred_small_instances_against_the_optimum_and_best_fit_decreasing():
    above, saved = [], 0
    for lengths, cap in instances(200):
        bins = pack(lengths, range(len(lengths)), cap)
        assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
        assert all(b and sum(lengths[i] for i in b) <= cap for b in bins)
        simple = len(best_fit_decreasing(lengths, range(len(lengths)), cap))
        saved += simple - len(bins)
        assert len(bins) <= simple
        above.append(len(bins) - fewest_bins(lengths, cap, len(bins)))
    assert min(above) == 0 and max(above) <= 1
    assert above.count(0) >= 190
    assert saved > 0, "no instance where best-fit decreasing is not the best says nothing"


@given(LENGTHS)
def test_lower_bound_is_one(lengths: list[int]):
    falling = sorted(lengths, reverse=True)
    least = fewest_possible(falling, CAP)
    assert -(-sum(lengths) // CAP) <= least <= len(pack(lengths, range(len(lengths)), CAP))


def test_lower_bound_counts_what_cannot_share():
    assert fewest_possible([11, 11, 11], 20) == 3
    assert fewest_possible([14, 7, 7, 7], 20) == 3
    assert fewest_possible([6, 6, 6, 6], 20) == 2


def test_a_sample_of_just_the_cap_less_the_threshold_may_share():
    assert fewest_possible([15, 5], 20) == 1
    assert fewest_possible([16, 16, 4, 4], 20) == 2


@given(LENGTHS, st.integers(0, 5))
def test_pack_evenly_is_valid_and_finds_what_best_fit_finds(lengths: list[int], more: int):
    count = len(best_fit_decreasing(lengths, range(len(lengths)), CAP)) + more
    costs = [float(n) for n in lengths]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    bins = pack_evenly(lengths, costs, order, count, CAP)
    assert bins is not None
    assert len(bins) == count
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= CAP for b in bins)


def test_pack_evenly_returns_none_where_it_cannot():
    assert pack_evenly([20, 20, 1], [1.0, 1.0, 1.0], [0, 1, 2], 2, CAP) is None


def test_pack_evenly_falls_back_where_evenness_alone_fails():
    lengths = [5, 5, 4, 4, 2]
    costs = [float(n) for n in lengths]
    bins = pack_evenly(lengths, costs, range(5), 2, 10)
    assert bins is not None
    assert sorted(sum(lengths[i] for i in b) for b in bins) == [10, 10]
