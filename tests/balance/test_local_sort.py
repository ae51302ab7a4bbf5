"""LocalSort: dealt in arrival order, sorted on each rank, one sample per microbatch."""

from __future__ import annotations

from odc.balance import local_sort


def test_deals_round_robin_and_sorts_each_rank():
    plan = local_sort([3, 9, 5, 1, 7], 2, 10)
    assert plan.ranks == [[[4], [2], [0]], [[1], [3]]]


def test_fewer_samples_than_ranks():
    assert local_sort([3], 3, 10).ranks == [[[0]], [], []]


def test_groups_are_dealt_whole_and_low_caps_passed_over():
    assert local_sort([3, 9, 5, 1], 2, 10, groups=["a", "b", "a", "b"]).ranks == [[[2], [0]], [[1], [3]]]
    assert local_sort([3, 9, 5, 1], 2, [4, 10]).ranks == [[[0], [3]], [[1], [2]]]
