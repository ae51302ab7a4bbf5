"""Small steps whose times can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odc.errors import ConfigError
from odc.simulate import Cluster, Model, Step, Unit, even_model, simulate
from odc.simulate.workload import Gang

TWO = Model((Unit(8.0, 8.0, 0.5), Unit(8.0, 8.0, 0.5)))


def test_one_rank_computes_and_nothing_else() -> None:
    result = simulate(Step(Cluster(1, intra_bandwidth=1.0), TWO, [[3.0, 6.0]], "on demand"))
    assert (result.seconds, result.busy, result.bubble) == (pytest.approx(9.0), (pytest.approx(9.0),), pytest.approx(0))


def test_fetches_hide_behind_compute_but_for_the_first_of_each_pass() -> None:
    # 2 ranks: half of 8 bytes at 4 bytes/s is 1 s a fetch. Forward 3 s a unit, backward 6 s.
    cluster = Cluster(2, intra_bandwidth=4.0)
    alone = Step(cluster, TWO, [[18.0], []], "on demand")
    assert simulate(alone).transfer[0] == pytest.approx(2.0)
    assert simulate(alone).seconds == pytest.approx(18 + 2 + 1)  # and the last push
    late = Step(cluster, TWO, [[18.0], []], "on demand", prefetch=0)
    assert simulate(late).transfer[0] == pytest.approx(4.0)


def test_a_collective_waits_for_its_last_rank() -> None:
    cluster = Cluster(2, intra_bandwidth=4.0)
    result = simulate(Step(cluster, TWO, [[18.0], [6.0]], "collectives", prefetch=0))
    # Rank 0: gather 1, 3, gather 1, 3, gather 1, 6, gather 1 (after the reduction: 1), 6, reduction 1.
    assert result.seconds == pytest.approx(18 + 4 + 1 + 1)
    assert result.busy == (pytest.approx(18.0), pytest.approx(6.0))


@pytest.mark.parametrize("in_flight", [0, 1])
def test_resident_ranks_wait_before_their_first_and_after_their_last_microbatch(in_flight: int) -> None:
    # 2 ranks: a gather or reduction of 8 bytes at 4 bytes/s takes 1 s. Rank 0 waits for 4 s, then reduces twice.
    cluster = Cluster(2, intra_bandwidth=4.0, reductions_in_flight=in_flight)
    result = simulate(Step(cluster, TWO, [[18.0], [20.0, 2.0]], "resident"))
    assert result.seconds == pytest.approx(2 + 22 + 2)
    assert result.transfer[0] == pytest.approx(2 + (2 if in_flight == 0 else 1))
    free = simulate(Step(Cluster(2, reductions_in_flight=in_flight), TWO, [[18.0], [20.0, 2.0]], "resident"))
    assert free.seconds == pytest.approx(22.0)


def test_dummies_fill_up_counts_under_collectives_only() -> None:
    model = replace(even_model(2, 8.0), unit_seconds=0.5)
    step = Step(Cluster(2), model, [[4.0, 4.0], [4.0]], "collectives")
    assert simulate(step).microbatches == (2, 2)
    assert simulate(step).busy[1] == pytest.approx(4.0 + 2 * 4 * 0.5)
    assert simulate(Step(Cluster(2), model, step.seconds, "on demand")).microbatches == (2, 1)
    assert simulate(Step(Cluster(2), model, [[4.0], []], "resident")).microbatches == (2, 1)


def test_transfers_queue_at_an_owner_that_holds_all() -> None:
    even = Cluster(4, intra_bandwidth=6.0)
    single = Cluster(4, intra_bandwidth=6.0, owner_skew=4.0)
    model = Model((Unit(8.0, 0.0, 1.0, kept=True),))
    step = Step(even, model, [[1.0]] * 4, "on demand")
    assert simulate(step).seconds == pytest.approx(1 + 1.0)  # 3/4 of 8 bytes, all at once
    # The owner's link sends 3/4 * 8 bytes (its own rank needs none) to each of four, one after the other.
    queued = simulate(Step(single, model, step.seconds, "on demand"))
    assert queued.seconds == pytest.approx(1 + 4 * 1.0)


def test_an_owner_is_not_kept_free_for_pushes_that_wait_for_their_ranks_link() -> None:
    # A push takes 1 s on its rank's link and 0.5 s at the fullest owner. Rank 0 asks for four at once, rank 1 for its
    # first after 0.06 s: eight pushes keep the owner busy for 4 s, and rank 1's link is the last to end.
    cluster = Cluster(4, intra_bandwidth=6.0, owner_skew=2.0)
    model = Model((Unit(0.0, 8.0, 0.25),) * 4)
    step = Step(cluster, model, [[0.0], [0.12], [], []], "on demand")
    assert simulate(step).seconds == pytest.approx(0.06 + 4 * 1.0)


def test_pieces_wait_in_every_unit_before_the_microbatches() -> None:
    # 3 ranks. Rank 0 is slow: pieces of 9 s take 18 s there and 9 s on rank 1, in 4 uses of 1/6, 1/6, 1/3, 1/3.
    gang = Gang((1, 0), (9.0, 9.0), exchange_seconds=0.5)
    step = Step(Cluster(3, slow={0: 2.0}), TWO, [[], [3.0], [30.0]], "on demand", gangs=[gang])
    result = simulate(step)
    assert result.busy == pytest.approx((18.0, 12.0, 30.0))
    assert result.transfer == pytest.approx((3.0, 3.0, 0.0))  # 0.5 s a unit in forward, twice that in backward
    assert result.seconds == pytest.approx(30.0), "a rank without pieces waits for no other"
    alone = simulate(replace(step, seconds=[[], [3.0], []]))
    # Rank 1 computes its last use of 3 s once rank 0 has begun its own, 12 s and three exchanges after the start.
    assert alone.seconds == pytest.approx(max(18 + 3, 12 + 3 + 3 + 3))
    second = Gang((0, 2), (6.0, 3.0))
    both = simulate(replace(step, seconds=[[], [3.0], []], gangs=[gang, second]))
    assert both.seconds == pytest.approx(21 + 12), "the second sample's rank 0 comes from the first"
    assert both.microbatches == (0, 1, 0)


@pytest.mark.parametrize("gang", [Gang((0, 0), (1.0, 1.0)), Gang((0, 3), (1.0, 1.0)), Gang((0, 1), (1.0,))])
def test_gangs_that_cannot_be(gang: Gang) -> None:
    with pytest.raises(ConfigError, match="different ranks of the cluster"):
        Step(Cluster(3), TWO, [[], [], []], "on demand", gangs=[gang])
    with pytest.raises(ConfigError, match="not under 'collectives'"):
        Step(Cluster(3), TWO, [[], [], []], "collectives", gangs=[gang])


def test_dynamic_gives_the_next_microbatch_to_the_rank_that_is_free() -> None:
    step = Step(Cluster(2, slow={1: 3.0}), even_model(2, 1.0), [[1.0] * 8, []], "dynamic")
    result = simulate(step)
    assert result.microbatches == (6, 2)
    assert result.seconds == pytest.approx(6.0)


def test_hybrid_sharding_stays_in_the_node_and_crosses_once() -> None:
    cluster = Cluster(4, 2, intra_bandwidth=8.0, inter_bandwidth=2.0)
    model = Model((Unit(8.0, 8.0, 1.0, kept=True),))
    step = Step(cluster, model, [[3.0]] * 4, "on demand", within_node=True)
    # Fetch and push: half of 8 bytes at 8 bytes/s. Then each rank exchanges half of its 4 bytes, twice, at 2 bytes/s.
    assert simulate(step).seconds == pytest.approx(0.5 + 3 + 0.5 + 2 * 1.0)
    full = simulate(Step(cluster, model, step.seconds, "on demand"))
    assert full.transfer[0] == pytest.approx(8 / 2 / 2.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranks": 0}, "ranks"),
        ({"ranks": 6, "ranks_per_node": 4}, "divide"),
        ({"ranks": 2, "intra_bandwidth": 0.0}, "intra_bandwidth"),
        ({"ranks": 2, "intra_latency": -1.0}, "intra_latency"),
        ({"ranks": 2, "collective": "star"}, "ring, tree, gloo"),
        ({"ranks": 2, "owner_skew": 3.0}, "owner_skew"),
        ({"ranks": 2, "slow": {2: 1.5}}, "rank 2"),
        ({"ranks": 2, "reductions_in_flight": -1}, "reductions_in_flight"),
    ],
)
def test_clusters_that_cannot_be(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cluster(**fields)  # type: ignore[arg-type]


def test_steps_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="2 ranks, the cluster has 3"):
        Step(Cluster(3), TWO, [[1.0], []], "on demand")
    with pytest.raises(ConfigError, match="finite"):
        Step(Cluster(1), TWO, [[float("nan")]], "on demand")
    with pytest.raises(ConfigError, match="prefetch"):
        Step(Cluster(1), TWO, [[1.0]], "on demand", prefetch=2)
    with pytest.raises(ConfigError, match="add up"):
        Model((Unit(1.0, 1.0, 0.5),))
