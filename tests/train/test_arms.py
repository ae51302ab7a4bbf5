from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from odc import Settings
from odc.balance import lb_dynamic, linear_cost
from odc.errors import ConfigError, UnsupportedError
from odc.memory import atomics, plain_x86_64
from odc.train.arms import ARMS, arm_named
from odc.train.compare import CompareConfig, run_arms
from odc.train.config import ARM_NAMES, JobConfig
from odc.train.preflight import check_arm, preflight

LENGTHS = [90, 10, 10, 10, 10, 10]


def test_every_name_has_an_arm_and_others_are_refused() -> None:
    assert tuple(ARMS) == ARM_NAMES
    assert all(arm_named(name).name == name for name in ARM_NAMES)
    with pytest.raises(ConfigError, match="there is no arm 'zero'; there are fsdp2, "):
        arm_named("zero")


def test_arms_of_one_balance_have_the_same_plan() -> None:
    plans = {name: arm.plan(LENGTHS, 2, 100, linear_cost, 0) for name, arm in ARMS.items()}
    assert plans["fsdp2"] == plans["odc-equal"]
    assert plans["fsdp2-resident"] == plans["odc"]
    assert plans["odc-dynamic"] == lb_dynamic(LENGTHS, 2, 100)


def test_without_libatomic_the_dynamic_arm_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    job = JobConfig(model="m", data="d", output=str(tmp_path))
    with mock.patch.object(atomics, "default_atomics", plain_x86_64):
        check_arm(job, "odc")
        with pytest.raises(UnsupportedError, match="apt-get install libatomic1"):
            run_arms(CompareConfig(job, arms=("odc", "odc-dynamic")), print)
        with pytest.raises(UnsupportedError, match="apt-get install libatomic1"):
            preflight(job.with_(arm="odc-dynamic"))


def test_a_queue_is_dealt_like_samples_to_loaders_and_a_static_rank_loads_what_it_computes() -> None:
    lengths = [9, 8, 7, 6, 5]
    plan = ARMS["odc-dynamic"].plan(lengths, 2, 100, linear_cost, 0)
    loads = [ARMS["odc-dynamic"].loads(plan, rank) for rank in range(2)]
    assert [[cost for _, cost in own] for own in loads] == [[9, 7, 5], [8, 6]]
    plan = ARMS["odc"].plan(lengths, 2, 100, linear_cost, 0)
    assert [[mb for mb, _ in ARMS["odc"].loads(plan, rank)] for rank in range(2)] == plan.ranks


def test_counts_are_equal_only_where_ranks_meet_at_every_microbatch() -> None:
    plan = ARMS["odc"].plan([90, 90, 90], 2, 100, linear_cost, 0)
    assert sorted(map(len, plan.ranks)) == [1, 2]
    assert sorted(ARMS["odc"].counts(plan)) == [1, 2]
    assert ARMS["fsdp2"].counts(plan) == [2, 2]


def test_a_resident_rank_without_samples_still_takes_part() -> None:
    plan = ARMS["fsdp2-resident"].plan([50], 2, 100, linear_cost, 0)
    assert sorted(ARMS["odc"].counts(plan)) == [0, 1]
    assert ARMS["fsdp2-resident"].counts(plan) == [1, 1]


def test_the_prediction_fits_how_often_ranks_meet() -> None:
    plan = ARMS["odc"].plan([90, 60, 50, 30], 2, 100, linear_cost, 0)
    assert ARMS["odc"].predicted_bubble(plan) == plan.bubble
    assert ARMS["fsdp2"].predicted_bubble(plan) == plan.bubble_per_microbatch


def unequal_counts(rank: int, world: int, name: str) -> list[float]:
    """Gradients after 3 microbatches on rank 0 and one elsewhere; the root has no parameters of its own."""
    torch.manual_seed(0)
    arm, model = ARMS[name], torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))  # type: ignore[index]
    arm.shard(model, list(model), Settings(timeout_s=60.0))
    for _ in range(2):
        model.zero_grad()
        arm.run(model, 1 if rank else 3, lambda m: model(torch.full((1, 4), 1.0 + m)).sum().backward())
    whole = [parameter.grad.full_tensor().flatten() for parameter in model.parameters()]  # type: ignore[union-attr]
    return torch.cat(whole).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["fsdp2-resident", "odc"])
def test_ranks_may_run_unequal_counts(name: str, ranks: Callable[[int], Any]) -> None:
    first, second = ranks(2).run(unequal_counts, name)
    assert first == second
    torch.manual_seed(0)
    alone = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))
    for scale in (1.0, 2.0, 3.0, 1.0):
        (alone(torch.full((1, 4), scale)).sum() / 2).backward()
    whole = torch.cat([parameter.grad.flatten() for parameter in alone.parameters()])  # type: ignore[arg-type, union-attr]
    assert first == pytest.approx(whole.tolist())
