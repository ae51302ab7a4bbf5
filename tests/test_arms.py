"""The table of arms: the plans they make, and that every tool and docs/compare.md take an arm's name for the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from odc.arms import ARM_NAMES, ARMS, ArmName, arm_named
from odc.balance import Plan, linear_cost, local_sort
from odc.errors import ConfigError
from odc.simulate import Cluster, even_model, simulate_plan
from odc.simulate.scenario import Scenario
from odc.simulate.study import study

LENGTHS = [90, 70, 40, 40, 30, 20, 10, 10]
PAGE = Path(__file__).parents[1] / "docs" / "compare.md"


def plan_of(name: ArmName, lengths: list[int] = LENGTHS, ranks: int = 2) -> Plan:
    return ARMS[name].plan(lengths, ranks, 100, linear_cost, 0)


def test_every_name_has_an_arm_and_others_are_refused() -> None:
    assert tuple(ARMS) == ARM_NAMES
    assert all(arm_named(name).name == name for name in ARM_NAMES)
    with pytest.raises(ConfigError, match="there is no arm 'zero'; there are fsdp2-localsort, "):
        arm_named("zero")


def test_a_sorted_rank_keeps_the_samples_that_it_was_dealt() -> None:
    for name in ("fsdp2-localsort", "odc-localsort"):
        plan = plan_of(name)
        assert plan.ranks == [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]
    assert plan_of("odc-localsort", [10, 20, 30, 40, 50], 2).ranks == [[[4], [2], [0]], [[3], [1]]]


def test_equal_samples_is_a_restriction_of_lb_micro() -> None:
    lengths = [100, *[10] * 7]
    free, restricted = plan_of("fsdp2", lengths), plan_of("fsdp2-equal-samples", lengths)
    assert [sum(map(len, own)) for own in restricted.ranks] == [4, 4]
    assert sorted(sum(map(len, own)) for own in free.ranks) == [1, 7]
    assert free.stepped < restricted.stepped


@pytest.mark.parametrize("kind", ["-localsort", "-equal-samples"])
def test_a_pair_of_arms_differs_in_communication_alone(kind: str) -> None:
    collectives, on_demand = (arm_named(f"{one}{kind}") for one in ("fsdp2", "odc"))
    assert collectives.balance == on_demand.balance
    assert (collectives.on_demand, on_demand.on_demand) == (False, True)
    assert plan_of("fsdp2") == plan_of("odc-equal") and plan_of("fsdp2-padded") == plan_of("odc")


@pytest.mark.parametrize("name", ARM_NAMES)
def test_a_simulated_arm_runs_the_microbatches_that_a_trained_one_does(name: ArmName) -> None:
    plan = plan_of(name, [90, 90, 90, 5, 5], 4)
    ran = simulate_plan(plan, ARMS[name], Cluster(4, 2), even_model(2, 1.0)).microbatches
    counts = ARMS[name].counts(plan)
    assert (sum(ran) == sum(counts)) if ARMS[name].dynamic else (list(ran) == counts)


def test_a_study_plans_each_arm_by_its_own_planner() -> None:
    scenario = Scenario(
        minibatches=2, ranks=4, machine="a100-free", arms=("fsdp2-equal-samples", "fsdp2", "odc-localsort")
    )
    minibatches, cap = scenario.draw()
    done, cost = study(scenario), scenario.cost()
    for name in ("fsdp2-equal-samples", "odc-localsort"):
        plans = [ARMS[name].plan(lengths, 4, cap, cost, 0) for lengths in minibatches]  # type: ignore[index]
        expected = [plan.longest if name == "odc-localsort" else plan.stepped for plan in plans]
        found = [seconds / scenario.seconds_per_flop() for seconds in done[name].steps_s]
        assert found == pytest.approx(expected, rel=0.02), name


def test_what_is_dealt_to_loaders_is_a_queue_only_under_the_dynamic_arm() -> None:
    lengths = [9, 8, 7, 6, 5]
    plan = plan_of("odc-dynamic", lengths)
    loads = [ARMS["odc-dynamic"].loads(plan, rank) for rank in range(2)]
    assert [[cost for _, cost in own] for own in loads] == [[9, 7, 5], [8, 6]]
    plan = plan_of("odc", lengths)
    assert [[mb for mb, _ in ARMS["odc"].loads(plan, rank)] for rank in range(2)] == plan.ranks


def test_counts_are_padded_by_collectives_and_end_with_a_dummy_where_parameters_are_resident() -> None:
    plan = plan_of("odc", [90, 90, 90])
    assert sorted(map(len, plan.ranks)) == [1, 2]
    assert sorted(ARMS["odc"].counts(plan)) == [1, 2]
    assert ARMS["fsdp2-padded"].counts(plan) == [2, 2]
    assert sorted(ARMS["fsdp2-resident"].counts(plan)) == [2, 3]
    assert sorted(ARMS["fsdp2-resident"].counts(plan_of("odc", [50]))) == [1, 2]


def test_the_prediction_fits_how_often_ranks_meet() -> None:
    plan = local_sort([90, 60, 5, 55], 2, 100)
    assert plan.bubble < plan.bubble_per_microbatch
    for name in ARM_NAMES:
        expected = plan.bubble_per_microbatch if ARMS[name].transport == "collectives" else plan.bubble
        assert ARMS[name].predicted_bubble(plan, 2) == expected


def test_ranks_of_one_node_do_not_meet_those_of_another_in_a_hybrid_arm() -> None:
    """The nodes end together, though all their microbatches differ: 10 and 1 on one, 1 and 10 on the other."""
    ranks = [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]]
    plan = Plan.of(ranks, [10, 1, 10, 1, 1, 10, 1, 10])
    assert ARMS["fsdp2"].predicted_bubble(plan, 2) == pytest.approx(1 - 11 / 20)
    assert ARMS["fsdp2-hybrid"].predicted_bubble(plan, 2) == 0.0


def test_the_page_defines_every_arm_as_the_table_has_it() -> None:
    section = PAGE.read_text(encoding="utf-8").split("\n## The arms\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in row.strip("| ").split("|")] for row in re.findall(r"^\| `.*$", section, re.MULTILINE)
    ]
    assert [row[0].strip("`") for row in rows] == list(ARM_NAMES)
    plans = {
        "LocalSort": "local_sort",
        "LB-Micro with equal sample counts": "lb_micro_equal_samples",
        "LB-Micro": "lb_micro",
        "LB-Mini": "lb_mini",
        "LB-Split": "lb_split",
        "LB-Dynamic": "lb_dynamic",
    }
    for name, plan, communication in rows:
        arm = arm_named(name.strip("`"))
        assert arm.balance == plans[re.split("[,:]", plan)[0]], name
        assert arm.on_demand == communication.startswith("on demand"), name
        assert arm.within_node == ("within a node" in communication), name
        assert (arm.transport == "resident") == ("twice in a minibatch" in communication), name


def test_the_emulated_benchmark_runs_arms_of_the_table() -> None:
    from bench.emulated import COMPARED

    assert COMPARED[0] == "fsdp2-equal-samples" and set(COMPARED) <= set(ARM_NAMES)


def test_the_benchmark_of_split_samples_exchanges_a_small_part_of_the_tokens_that_are_planned() -> None:
    from bench.slept import COST, LONGEST, thinned, typical

    plan = ARMS["odc-split"].plan([131_072, 4_000, 9_000], 8, 131_072, linear_cost, 0)
    thin = thinned(plan)
    assert plan.splits and [split.costs for split in thin.splits] == [split.costs for split in plan.splits]
    for split, whole in zip(thin.splits, plan.splits, strict=True):
        split.validate(8)
        assert 2 * len(split.ranks) <= split.length <= LONGEST and split.ranks == whole.ranks
    minibatches, cap = typical("longalign", 8, 2, 0)
    assert len(minibatches) == 2 and all(max(lengths) <= cap for lengths in minibatches)
    assert all(2.0 < 8 * max(map(COST, lengths)) / sum(map(COST, lengths)) < 3.2 for lengths in minibatches)
