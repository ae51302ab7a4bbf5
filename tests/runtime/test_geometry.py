from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.runtime import Geometry


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    shards, replicas = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    members = shards * replicas
    ranks = tuple(draw(st.permutations(range(100, 100 + members))))
    return Geometry(ranks, shards, draw(st.integers(0, members - 1)))


def test_rows_and_columns_of_a_hybrid_mesh() -> None:
    # Two replicas of three shards, on ranks that are not their own indices.
    geometry = Geometry((20, 21, 22, 40, 41, 42), 3, 4)
    assert geometry.shard == 1
    assert geometry.row == (3, 4, 5)
    assert geometry.column == (1, 4)
    assert geometry.others() == (5, 0, 1, 2, 3)
    assert geometry.row_from_next() == (5, 3, 4)


def test_a_single_rank_has_no_peers() -> None:
    geometry = Geometry((7,), 1, 0)
    assert geometry.others() == ()
    assert geometry.row_from_next() == geometry.row == geometry.column == (0,)


@given(geometries())
def test_every_member_is_met_once(geometry: Geometry) -> None:
    assert sorted((*geometry.others(), geometry.me)) == list(geometry.members)
    assert sorted(geometry.row_from_next()) == list(geometry.row)
    assert geometry.row_from_next()[-1] == geometry.me
    assert set(geometry.row) & set(geometry.column) == {geometry.me}
    assert [member % geometry.shards for member in geometry.row] == list(range(geometry.shards))
    assert {member % geometry.shards for member in geometry.column} == {geometry.shard}
    assert list(geometry.column) == sorted(geometry.column)
    assert len(geometry.row) * len(geometry.column) == len(geometry.ranks)


@given(geometries())
def test_members_visit_different_peers_first(geometry: Geometry) -> None:
    first = [Geometry(geometry.ranks, geometry.shards, me).row_from_next()[0] for me in geometry.members]
    assert len(set(first)) == len(first)


@given(st.integers(1, 8), st.data())
def test_no_two_sources_share_a_staging_ring(shards: int, data: st.DataObject) -> None:
    owner = data.draw(st.integers(0, shards - 1))
    geometry = Geometry(tuple(range(shards)), shards, owner)
    distances = [geometry.distance(source, owner) for source in range(shards) if source != owner]
    assert sorted(distances) == list(range(1, shards))
    assert geometry.distance(owner, owner) == 0


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
    with pytest.raises(ValueError, match=r"member|rows"):
        Geometry(ranks, shards, me)
