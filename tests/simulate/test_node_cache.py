"""Bytes and seconds over nodes: by the formulas of docs/hosts.md, and worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odc.arms import Transport
from odc.errors import ConfigError
from odc.simulate import Cluster, Model, Step, Unit, simulate
from odc.simulate.workload import Gang

ONE = Model((Unit(8.0, 8.0, 1.0),))
TWO = Model((Unit(8.0, 8.0, 0.5), Unit(8.0, 8.0, 0.5)))
LINKS = Cluster(4, 2, inter_bandwidth=1.0, node_cache=True)  # 2 bytes/s a node


def test_a_shard_and_a_sum_cross_once_a_minibatch() -> None:
    # Half of 8 bytes at 2 bytes/s: 2 s before the first microbatch, and 2 s after the last rank.
    step = Step(LINKS, ONE, [[6.0] * 3, [6.0], [], [6.0]], "on demand")
    result = simulate(step)
    assert (result.seconds, result.node_bytes) == (pytest.approx(2 + 18 + 2), pytest.approx(8.0))
    assert result.transfer == pytest.approx((2.0, 2.0, 0.0, 2.0)), "all ranks of a node wait for the same read"
    fp32 = simulate(replace(step, model=replace(ONE, accumulator=2.0)))
    assert (fp32.seconds, fp32.node_bytes) == (pytest.approx(2 + 18 + 4), pytest.approx(12.0))


def test_units_cross_one_after_the_other_as_far_as_they_are_asked_for() -> None:
    # Forward takes 3 s a unit, so the second is read meanwhile; backward finds both in the cache.
    step = Step(LINKS, TWO, [[18.0], [], [], []], "on demand")
    assert simulate(step).seconds == pytest.approx(2 + 18 + 4)
    assert simulate(replace(step, prefetch=0)).seconds == pytest.approx(4 + 18 + 4)
    slow = replace(step, cluster=replace(LINKS, inter_bandwidth=0.25))  # 8 s a read
    assert simulate(slow).seconds == pytest.approx(8 + 8 + 3 + 12 + 16)


def test_what_lies_in_the_node_is_copied_by_every_rank() -> None:
    cluster = replace(LINKS, inter_bandwidth=1e9, intra_bandwidth=6.0)  # 3/4 of 8 bytes: 1 s a copy
    step = Step(cluster, ONE, [[6.0], [6.0], [], []], "on demand", prefetch=0)
    assert simulate(step).seconds == pytest.approx(2 * 1 + 6 + 1), "two fetches and the last push"


def test_a_read_asks_and_is_answered_and_a_sum_is_announced() -> None:
    cluster = replace(LINKS, inter_bandwidth=1e9, inter_latency=0.5)
    assert simulate(Step(cluster, ONE, [[6.0], [], [], []], "on demand")).seconds == pytest.approx(1 + 6 + 1.5)


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 1), (2, 4), (3, 2)])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_bytes_are_those_of_the_formulas(hosts: int, per_host: int, microbatches: int) -> None:
    """With b = g = a, as multiples of the parameters' bytes."""
    world, m = hosts * per_host, microbatches
    cluster = Cluster(world, per_host, inter_bandwidth=1.0, node_cache=True, collective="gloo")

    def crossing(transport: Transport, **options: bool) -> float:
        naive = replace(cluster, node_cache=not options.pop("naive", False))
        step = Step(naive, TWO, [[1.0] * m] * world, transport, **options)  # type: ignore[arg-type]
        return simulate(step).node_bytes / TWO.parameter_bytes

    apart = (hosts - 1) / hosts
    assert crossing("on demand") == pytest.approx(2 * apart)
    assert crossing("on demand", naive=True) == pytest.approx(per_host * apart * 3 * m)
    assert crossing("collectives") == pytest.approx((world - 1) / world * 4 * m)
    assert crossing("collectives", reduce_once=True) == pytest.approx((world - 1) / world * (2 * m + 2))
    if per_host > 1:
        assert crossing("collectives", within_node=True) == pytest.approx(2 * apart)


def test_pieces_move_what_microbatches_do() -> None:
    cluster = Cluster(4, 2, inter_bandwidth=1.0)
    whole = simulate(Step(cluster, ONE, [[6.0], [6.0], [6.0], []], "on demand"))
    split = simulate(Step(cluster, ONE, [[6.0], [], [], []], "on demand", gangs=[Gang((1, 2), (6.0, 6.0))]))
    assert split.node_bytes == whole.node_bytes == pytest.approx(3 / 2 * 3 * 8 / 2), "two fetches and a push each"


def test_collectives_move_the_padding_of_uneven_shards_for_which_they_take_time() -> None:
    even, skewed = (
        Step(Cluster(4, 2, inter_bandwidth=1.0, owner_skew=skew), ONE, [[6.0]] * 4, "collectives")
        for skew in (1.0, 2.0)
    )
    assert simulate(skewed).node_bytes == pytest.approx(2 * simulate(even).node_bytes)
    assert skewed.cluster.gather_seconds(8.0, 4) == pytest.approx(2 * even.cluster.gather_seconds(8.0, 4))


def test_gloo_takes_twice_as_long_to_reduce_as_to_gather() -> None:
    cluster = Cluster(4, 2, inter_bandwidth=1.0, inter_latency=0.25, collective="gloo")
    assert cluster.gather_seconds(8.0, 4) == pytest.approx(3 * 0.25 + 6 / 2)
    assert cluster.gather_seconds(8.0, 4, reduces=True) == pytest.approx(2 * (3 * 0.25 + 6 / 2))
    step = Step(replace(cluster, inter_latency=0.0), ONE, [[6.0, 6.0]] * 4, "collectives", prefetch=0, reduce_once=True)
    assert simulate(step).seconds == pytest.approx(12 + 4 * 3 + 6)


def test_owners_of_the_node_cache_hold_equally_much() -> None:
    with pytest.raises(ConfigError, match="owner_skew must be 1"):
        replace(LINKS, owner_skew=2.0)


def test_what_has_not_changed_of_the_parameters_is_not_read() -> None:
    """A quarter of half of 8 bytes, at 2 bytes/s: 0.5 s before the first microbatch; sums cross as before."""
    cluster = replace(LINKS, changed=0.25)
    result = simulate(Step(cluster, ONE, [[6.0] * 3, [6.0], [], [6.0]], "on demand"))
    assert (result.seconds, result.node_bytes) == (pytest.approx(0.5 + 18 + 2), pytest.approx(1 + 4))
    frozen = simulate(Step(replace(LINKS, changed=0.0, inter_latency=0.5), ONE, [[6.0], [], [], []], "on demand"))
    assert (frozen.seconds, frozen.node_bytes) == (pytest.approx(1 + 6 + 1.5 + 2), pytest.approx(4)), "it still asks"
    hybrid = Step(cluster, ONE, [[6.0]] * 4, "on demand", within_node=True)
    assert simulate(hybrid) == simulate(replace(hybrid, cluster=LINKS)), "no shard is another node's"


@pytest.mark.parametrize("wrong", [-0.1, 1.1])
def test_a_share_of_the_parameters_changes_and_only_caches_know_it(wrong: float) -> None:
    with pytest.raises(ConfigError, match="changed must be a share, 0 to 1, and below 1 only with node_cache, not"):
        replace(LINKS, changed=wrong)
    with pytest.raises(ConfigError, match="changed must be a share"):
        Cluster(4, 2, changed=0.5)
