"""Packing under the cap against exhaustive search on small instances."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from odc.balance.packing import best_fit_decreasing, pack_evenly

CAP = 20
LENGTHS = st.lists(st.integers(1, CAP), min_size=1, max_size=40)


def fewest_bins(lengths: list[int], cap: int) -> int:
    def place(i: int, rooms: tuple[int, ...]) -> int:
        if i == len(lengths):
            return len(rooms)
        fits = {
            place(i + 1, (*rooms[:b], room - lengths[i], *rooms[b + 1 :]))
            for b, room in enumerate(rooms)
            if room >= lengths[i] and room not in rooms[:b]
        }
        return min(fits | {place(i + 1, (*rooms, cap - lengths[i]))})

    return place(0, ())


@given(LENGTHS)
def test_best_fit_decreasing_is_valid(lengths: list[int]):
    bins = best_fit_decreasing(lengths, range(len(lengths)), CAP)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(b and sum(lengths[i] for i in b) <= CAP for b in bins)


def test_best_fit_decreasing_is_near_the_fewest():
    draw = random.Random(5)
    above = []
    for _ in range(60):
        lengths = [draw.randint(1, CAP) for _ in range(7)]
        above.append(len(best_fit_decreasing(lengths, range(7), CAP)) - fewest_bins(lengths, CAP))
    assert min(above) == 0
    assert max(above) <= 1


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


def test_pack_evenly_says_when_it_cannot():
    assert pack_evenly([20, 20, 1], [1.0, 1.0, 1.0], [0, 1, 2], 2, CAP) is None


def test_pack_evenly_falls_back_where_evenness_alone_fails():
    lengths = [5, 5, 4, 4, 2]
    costs = [float(n) for n in lengths]
    bins = pack_evenly(lengths, costs, range(5), 2, 10)
    assert bins is not None
    assert sorted(sum(lengths[i] for i in b) for b in bins) == [10, 10]
