from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.runtime import RankGrid


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    shards, replicas = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    members = shards * replicas
    ranks = tuple(draw(st.permutations(range(100, 100 + members))))
    return RankGrid(ranks, shards, draw(st.integers(0, members - 1)))


def test_shard_and_replica_groups_of_a_hybrid_mesh() -> None:
    # Two replicas of three shards, on ranks that are not their own indices.
    grid = RankGrid((20, 21, 22, 40, 41, 42), 3, 4)
    assert grid.shard == 1
    assert grid.shard_group == (3, 4, 5)
    assert grid.replica_group == (1, 4)
    assert grid.others() == (5, 0, 1, 2, 3)
    assert grid.shard_group_from_next() == (5, 3, 4)


def test_a_single_rank_has_no_peers() -> None:
    grid = RankGrid((7,), 1, 0)
    assert grid.others() == ()
    assert grid.shard_group_from_next() == grid.shard_group == grid.replica_group == (0,)


@given(grids())
def test_every_member_is_met_once(grid: RankGrid) -> None:
    assert sorted((*grid.others(), grid.me)) == list(grid.members)
    assert sorted(grid.shard_group_from_next()) == list(grid.shard_group)
    assert grid.shard_group_from_next()[-1] == grid.me
    assert set(grid.shard_group) & set(grid.replica_group) == {grid.me}
    assert [member % grid.shards for member in grid.shard_group] == list(range(grid.shards))
    assert {member % grid.shards for member in grid.replica_group} == {grid.shard}
    assert list(grid.replica_group) == sorted(grid.replica_group)
    assert len(grid.shard_group) * len(grid.replica_group) == len(grid.ranks)


@given(grids())
def test_members_visit_different_peers_first(grid: RankGrid) -> None:
    first = [RankGrid(grid.ranks, grid.shards, me).shard_group_from_next()[0] for me in grid.members]
    assert len(set(first)) == len(first)


@given(st.integers(1, 8), st.data())
def test_no_two_sources_share_a_staging_ring(shards: int, data: st.DataObject) -> None:
    owner = data.draw(st.integers(0, shards - 1))
    grid = RankGrid(tuple(range(shards)), shards, owner)
    distances = [grid.distance(source, owner) for source in range(shards) if source != owner]
    assert sorted(distances) == list(range(1, shards))
    assert grid.distance(owner, owner) == 0


@pytest.mark.parametrize(
    ("ranks", "shards", "me"),
    [
        ((0, 1, 2), 2, 0),  # not a rectangle
        ((0, 1), 0, 0),
        ((0, 1), 3, 0),
        ((0, 0), 2, 0),  # a rank twice
        ((0, 1), 2, 2),
        ((0, 1), 2, -1),
    ],
)
def test_refuses_what_is_no_mesh(ranks: tuple[int, ...], shards: int, me: int) -> None:
    with pytest.raises(ValueError, match=r"member|groups"):
        RankGrid(ranks, shards, me)
