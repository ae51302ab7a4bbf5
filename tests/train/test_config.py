from __future__ import annotations

import json

import pytest

from odc.errors import ConfigError
from odc.train.config import JobConfig, threads_per_rank


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arm": "zero1"}, "arm must be one of fsdp2, fsdp2-resident, odc-equal, odc"),
        ({"precision": "fp8"}, "precision must be one of fp32, bf16"),
        ({"long": "truncate"}, "long must be one of error, split, drop"),
        ({"ranks": 0}, "ranks must be a whole number, 1 or more"),
        ({"ranks": 2.0}, "ranks must be a whole number"),
        ({"steps": True}, "steps must be a whole number"),
        ({"max_tokens": 1}, "max_tokens must be a whole number, 2 or more"),
        ({"lr": float("nan")}, "lr must be a finite number"),
        ({"lr": 0.0}, "lr, eps and timeout_s must be above 0"),
        ({"clip": -1.0}, "clip must be a finite number, 0 or more"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"min_lr": 1.5}, "min_lr is a fraction"),
        ({"warmup": 11}, "warmup .11 steps. is longer than the job"),
        ({"save_every": 2}, "save_every needs an output folder"),
    ],
)
def test_bad_values_are_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig(model="m", data="d", **change)


def test_it_survives_json() -> None:
    config = JobConfig(model="m", data="d", betas=(0.8, 0.9), lr=1.1e-4)
    assert JobConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_changed_copy_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="steps"):
        JobConfig(model="m", data="d").with_(steps=0)


def test_the_runtime_gets_its_settings() -> None:
    settings = JobConfig(model="m", data="d", reproducible=True, accumulate="direct", timeout_s=5.0).settings()
    assert (settings.reproducible, settings.accumulate, settings.timeout_s) == (True, "direct", 5.0)


def test_ranks_share_the_cores() -> None:
    assert threads_per_rank(10**6) == 1
    assert threads_per_rank(1) >= 1
