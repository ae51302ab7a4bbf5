"""What holds for every policy: valid plans, the cap, clear refusals, determinism."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import up_to

from odc.balance import POLICIES, Plan, lb_micro, lb_mini, lb_split, linear_cost, policy_named, quadratic
from odc.errors import PlanError

CAP = 100
LENGTHS = st.lists(st.integers(1, CAP), min_size=1, max_size=48)
COSTS = st.sampled_from([linear_cost, quadratic(0.268, 4.05e-3), quadratic(0, 1)])
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


@each_policy
@given(LENGTHS, st.integers(1, 9), COSTS, st.integers(0, 3))
@settings(deadline=None)
def test_valid_capped_and_at_or_above_the_bound(policy, lengths, ranks, cost, seed):
    plan: Plan = policy(lengths, ranks, CAP, cost, seed)
    plan.validate(len(lengths))
    assert len(plan.ranks) == ranks
    for microbatches, costs in zip(plan.ranks, plan.costs, strict=True):
        for mb, predicted in zip(microbatches, costs, strict=True):
            assert sum(lengths[i] for i in mb) <= CAP
            assert predicted == pytest.approx(sum(cost(lengths[i]) for i in mb))
    assert plan.longest >= plan.bound * (1 - 1e-9)
    assert 0 <= plan.bubble_bound <= plan.bubble + 1e-9 <= plan.bubble_per_microbatch + 2e-9 < 1


@each_policy
def test_a_seed_may_be_of_numpy_and_is_an_integer(policy):
    lengths = [10] * 30
    assert policy(lengths, 4, CAP, seed=np.random.default_rng(0).integers(7, 8)) == policy(lengths, 4, CAP, seed=7)
    with pytest.raises(PlanError, match=r"seed must be an integer, got 7\.5"):
        policy(lengths, 4, CAP, seed=7.5)


@each_policy
@given(st.data(), LENGTHS, st.integers(1, 6), COSTS)
@settings(max_examples=up_to(60))
def test_speeds_caps_and_groups_are_kept(policy, data, lengths, ranks, cost):
    speeds = data.draw(st.lists(st.sampled_from([0.5, 0.9, 1.0]), min_size=ranks, max_size=ranks))
    caps = [CAP, *data.draw(st.lists(st.integers(0, CAP), min_size=ranks - 1, max_size=ranks - 1))]
    groups = data.draw(st.none() | st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    plan: Plan = policy(lengths, ranks, caps, cost, speeds=speeds, groups=groups)
    plan.validate(len(lengths))
    where = {i: rank for rank, microbatches in enumerate(plan.ranks) for mb in microbatches for i in mb}
    for rank, (microbatches, costs) in enumerate(zip(plan.ranks, plan.costs, strict=True)):
        for mb, predicted in zip(microbatches, costs, strict=True):
            assert sum(lengths[i] for i in mb) <= caps[rank]
            assert predicted == pytest.approx(sum(cost(lengths[i]) for i in mb) / speeds[rank])
    if groups is not None:
        assert len({(groups[i], where[i]) for i in where}) == len(set(groups))
    assert plan.longest >= plan.bound * (1 - 1e-9)


@pytest.mark.parametrize("policy", [lb_micro, lb_mini])
@given(LENGTHS, st.integers(1, 6), st.randoms(use_true_random=False))
@settings(max_examples=up_to(40))
def test_permutation_changes_nothing_but_names(policy, lengths, ranks, rng):
    shuffled = lengths[:]
    rng.shuffle(shuffled)
    one, other = (policy(values, ranks, CAP, quadratic(1, 0.01)) for values in (lengths, shuffled))
    assert one.costs == other.costs
    assert [[[lengths[i] for i in mb] for mb in rank] for rank in one.ranks] == [
        [[shuffled[i] for i in mb] for mb in rank] for rank in other.ranks
    ]


@each_policy
@given(LENGTHS, st.integers(1, 8))
@settings(max_examples=up_to(40))
def test_adding_a_rank_never_raises_the_bound(policy, lengths, ranks):
    more = policy(lengths, ranks + 1, CAP)
    assert more.bound <= policy(lengths, ranks, CAP).bound * (1 + 1e-12)


@each_policy
@given(LENGTHS, st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=up_to(30), deadline=None)
def test_same_input_and_seed_same_plan(policy, lengths, ranks, seed):
    assert policy(lengths, ranks, CAP, seed=seed) == policy(list(lengths), ranks, CAP, seed=seed)


FINGERPRINT = """
import hashlib, random
from odc.balance import POLICIES, quadratic
draw = random.Random(3)
lengths = [min(4096, int(draw.lognormvariate(6, 1)) + 1) for _ in range(96)]
cost = quadratic(0.268, 1.3e-4)
print(hashlib.sha256("".join(p(lengths, 8, 8192, cost, 1).to_json() for p in POLICIES.values()).encode()).hexdigest())
"""


def test_same_plan_in_another_process_with_another_hash_seed():
    def run(hash_seed: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(p for p in sys.path if p) + ":."},
        )
        return done.stdout.strip()

    assert len(run("1")) == hashlib.sha256().digest_size * 2
    assert run("1") == run("2")


@each_policy
def test_bad_input_is_named(policy):
    with pytest.raises(PlanError, match="no samples"):
        policy([], 2, CAP)
    with pytest.raises(PlanError, match="ranks=0"):
        policy([1], 0, CAP)
    if policy is not lb_split:  # which splits them: see test_lb_split
        with pytest.raises(PlanError, match="sample 2 has 101 tokens, more than the cap of 100"):
            policy([5, 100, 101], 2, CAP)
        with pytest.raises(PlanError, match="sample 1 has 60 tokens, more than the cap of 50"):
            policy([5, 60], 2, [50, 10])
        with pytest.raises(PlanError, match=r"list of integers, got float64 of shape \(\)"):
            policy(5.5, 2, CAP)
    with pytest.raises(PlanError, match="sample 1 has length 0"):
        policy([5, 0], 2, CAP)
    with pytest.raises(PlanError, match="lists 1 caps for 2 ranks"):
        policy([5], 2, [50])
    for cap in (50.0, [50, 50.5], "50"):
        with pytest.raises(PlanError, match="max_tokens must be an integer, or a sequence of one"):
            policy([5], 2, cap)
    with pytest.raises(PlanError, match="rank 1 has speed 0.0"):
        policy([5], 2, CAP, speeds=[1, 0])
    with pytest.raises(PlanError, match="1 speeds for 2 ranks"):
        policy([5], 2, CAP, speeds=[1])
    with pytest.raises(PlanError, match="groups names 2 samples, but there are 1"):
        policy([5], 2, CAP, groups=["a", "b"])
    with pytest.raises(PlanError, match="list of integers, got float64"):
        policy([5.5], 2, CAP)
    for ranks in (2.0, "2", None):
        with pytest.raises(PlanError, match=f"whole number of ranks, at least 1; got ranks={ranks!r}"):
            policy([5], ranks, CAP)
    for lengths in (5.5, [float("nan")], [None], [[1, 2], [3, 4]], [[1, 2], [3]]):
        with pytest.raises(PlanError, match="lengths must be one list of integers"):
            policy(lengths, 2, CAP)
    with pytest.raises(PlanError, match="cost of sample 1 .7 tokens. is nan"):
        policy([5, 7], 2, CAP, lambda length: float("nan") if length == 7 else 1.0)


@each_policy
@pytest.mark.parametrize("lengths", [[1, 2**63], [2**63, 2**63 + 1], [1, 2**64], np.array([1, 2**63], np.uint64)])
def test_a_length_that_is_too_large_to_count_is_named(policy, lengths):
    at = 0 if lengths[0] > 1 else 1
    with pytest.raises(PlanError, match=f"sample {at} has {lengths[at]} tokens, more than the 9223372036854775807"):
        policy(lengths, 2, 2**70)


@each_policy
def test_sums_of_lengths_do_not_wrap(policy):
    with pytest.raises(PlanError, match="lengths add up to more than the 9223372036854775807 tokens"):
        policy([2**62 + 1, 2**62 + 1], 2, 2**63 - 1)


def test_a_cap_may_be_larger_than_any_count():
    assert lb_mini([5, 7, 9], 2, [2**70, 9]).ranks == lb_mini([5, 7, 9], 2, [21, 9]).ranks


def test_policies_by_name():
    assert policy_named("lb_mini") is POLICIES["lb_mini"]
    with pytest.raises(PlanError, match=r"'lb_max'.*local_sort, lb_micro, lb_mini"):
        policy_named("lb_max")
