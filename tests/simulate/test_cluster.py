"""Costs of links against the textbook."""

from __future__ import annotations

import pytest

from odc.simulate import Cluster


def test_gather_in_one_node_is_a_ring() -> None:
    cluster = Cluster(8, intra_bandwidth=100.0, intra_latency=0.01, call_seconds=0.5)
    assert cluster.gather_seconds(800.0, 8) == pytest.approx(0.5 + 7 * 0.01 + 7.0)
    tree = Cluster(8, intra_bandwidth=100.0, intra_latency=0.01, collective="tree")
    assert tree.gather_seconds(800.0, 8) == pytest.approx(3 * 0.01 + 7.0)


def test_gather_over_nodes_brings_each_byte_into_a_node_once() -> None:
    cluster = Cluster(16, 8, intra_bandwidth=1e9, inter_bandwidth=10.0)
    assert cluster.gather_seconds(160.0, 16) == pytest.approx(160 / 2 / 8 / 10)
    # On demand every rank pulls the other node's half by itself: eight times as much through its link.
    assert cluster.transfer_seconds(160.0, 16) == pytest.approx(160 / 2 / 10)


def test_in_one_node_both_move_the_same_bytes() -> None:
    cluster = Cluster(8, intra_bandwidth=100.0)
    assert cluster.transfer_seconds(800.0, 8) == pytest.approx(7.0)
    assert cluster.gather_seconds(800.0, 8) == pytest.approx(7.0)


def test_one_rank_moves_nothing() -> None:
    cluster = Cluster(1, intra_bandwidth=1.0, intra_latency=1.0, call_seconds=1.0)
    assert cluster.transfer_seconds(800.0, 1) == cluster.gather_seconds(800.0, 1) == cluster.claim_seconds() == 0.0
    assert cluster.exchange_seconds(800.0) == 0.0


def test_uneven_shards_are_padded_in_collectives() -> None:
    even, skewed = Cluster(4, intra_bandwidth=1.0), Cluster(4, intra_bandwidth=1.0, owner_skew=2.0)
    assert skewed.gather_seconds(8.0, 4) == 2 * even.gather_seconds(8.0, 4)
