from __future__ import annotations

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.errors import UnsupportedError
from odc.protocol import RankGrid
from odc.protocol.grid import refuse_unsupported


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
def test_members_begin_with_different_peers(grid: RankGrid) -> None:
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


@st.composite
def spread_grids(draw: st.DrawFn) -> RankGrid:
    """One replica over several hosts, whose members need not follow each other."""
    hosts, each = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    order = draw(st.permutations([host for host in range(hosts) for _ in range(each)]))
    numbers = {host: number for number, host in enumerate(dict.fromkeys(order))}  # as they occur
    members = hosts * each
    me = draw(st.integers(0, members - 1))
    return RankGrid(tuple(range(100, 100 + members)), members, me, tuple(numbers[host] for host in order))


@given(spread_grids())
def test_places_on_hosts(grid: RankGrid) -> None:
    assert grid.host_count == len(set(grid.hosts))
    for member in grid.members:
        there = [other for other in grid.members if grid.hosts[other] == grid.hosts[member]]
        assert list(grid.on(grid.host(member))) == there
        assert grid.index(member) == there.index(member)
        column = grid.column(member)
        assert grid.host(column) == grid.here and grid.index(column) == grid.index(member)


@given(spread_grids())
def test_each_remote_member_has_one_place_in_the_mirror_of_its_host(grid: RankGrid) -> None:
    assert sorted((*grid.local, *grid.remote)) == list(grid.members)
    assert grid.me in grid.local
    places = {(grid.column(member), grid.row(grid.host(member))) for member in grid.remote}
    assert len(places) == len(grid.remote)
    assert {row for _, row in places} == set(range(grid.host_count - 1))
    for partner in grid.partners:
        assert grid.column(partner) == grid.me
        theirs = RankGrid(grid.ranks, grid.shards, partner, grid.hosts)
        assert grid.me in theirs.partners
        assert theirs.column(grid.me) == partner
        assert theirs.row(grid.here) == grid.row(grid.here, seen_from=theirs.here)
    assert grid.local_shard_group == grid.local
    assert grid.shards_span_hosts == (grid.host_count > 1)


def test_hosts_are_refused_that_a_mirror_cannot_be_laid_out_for() -> None:
    for hosts in ((0, 0, 1), (0, 2, 2, 0), (0, 0, 0, 1), (1, 0, 1, 0)):
        with pytest.raises(ValueError, match="hosts"):
            RankGrid((0, 1, 2, 3), 4, 0, hosts)


def test_hosts_address_each_other_in_turn() -> None:
    """Each step, every host goes to another one."""
    for me in range(6):
        grid = RankGrid(tuple(range(6)), 6, me, hosts=(0, 0, 1, 1, 2, 2))
        order = sorted(grid.partners, key=grid.steps_to)
        assert [grid.host(member) for member in order] == [(me // 2 + step) % 3 for step in (1, 2)]
    assert RankGrid((4, 7), 2, 0).steps_to(1) == 0


def test_a_host_is_a_node_unless_it_is_divided() -> None:
    hosts = (0, 0, 0, 0, 1, 1, 1, 1)
    grid = RankGrid(tuple(range(8)), 8, 5, hosts, 2)
    assert RankGrid(grid.ranks, 8, 5, hosts).nodes.hosts == hosts
    assert grid.nodes.hosts == (0, 0, 1, 1, 2, 2, 3, 3)
    assert (grid.local_shard_group, grid.nodes.local_shard_group) == ((4, 5, 6, 7), (4, 5))
    assert (grid.partners, grid.nodes.partners) == ((1,), (1, 3, 7))
    whole = RankGrid(grid.ranks, 8, 5, hosts, 4)
    assert grid.nodes.nodes is grid.nodes and whole.nodes is whole
    for shards, size in ((8, 3), (8, 8), (4, 2)):
        with pytest.raises(ValueError, match="do not divide"):
            RankGrid(tuple(range(8)), shards, 5, (), size)


@pytest.mark.parametrize(
    ("grid", "kernels", "refusal"),
    [
        (RankGrid((0, 1), 2, 0), "triton", ""),
        (RankGrid((0, 1), 2, 0, (0, 1)), "torch", ""),
        (RankGrid((0, 1, 2, 3), 2, 0, (0, 0, 1, 1)), "torch", ""),
        (RankGrid((0, 1, 2, 3), 4, 0, (0, 0, 1, 1), 2), "torch", ""),
        (RankGrid((0, 1), 2, 0, (0, 1)), "triton", "triton"),
        (RankGrid((0, 1, 2, 3), 2, 0, (0, 1, 0, 1)), "torch", "keep each replica on one host"),
        (RankGrid((0, 1, 2, 3), 4, 0, (0, 1, 0, 1), 2), "torch", "the shard dimension spans several of them"),
    ],
)
def test_what_does_not_work_over_hosts_is_refused(grid: RankGrid, kernels: str, refusal: str) -> None:
    with pytest.raises(UnsupportedError, match=refusal) if refusal else nullcontext():
        refuse_unsupported(grid, kernels=kernels)
