from __future__ import annotations

from typing import Any

import pytest

from odc.errors import ConfigError
from odc.experiments.config import GrpoConfig
from odc.experiments.grpo.samples import UpperHalf


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arm": "odc-dynamic"}, "arm must be one of"),
        ({"lag": 2}, "lag must be one of 0, 1"),
        ({"group": 1}, "group must be a whole number, 2 or more"),
        ({"lr": 0.0}, "lr and timeout_s must be above 0"),
        ({"kl": -1.0}, "kl must be a finite number"),
        ({"clip_low": 1.0}, "clip_low must be below 1"),
        ({"minibatches": 9}, "must not be more than prompts"),
        ({"max_tokens": 37}, "must hold a prompt and a response"),
        ({"max_tokens": 18, "arm": "odc-split"}, r"max_tokens \(18 in each of 2 pieces\) must hold a prompt and a res"),
        ({"max_tokens": 37, "arm": "odc-split", "ranks": 1}, r"max_tokens \(37\) must hold"),
        ({"balance": "verl", "prompts": 1, "group": 3}, "divide by the ranks"),
        ({"balance": "verl", "prompts": 5, "group": 3, "minibatches": 2}, "divide by the ranks"),
        ({"balance": "verl", "prompts": 3, "group": 3, "minibatches": 2}, "divide by the ranks"),
        ({"balance": "verl", "arm": "odc-split"}, "balance verl splits no sample"),
        ({"arm": "odc-split", "least_piece": 0}, "least_piece must be a whole number, 1 or more"),
    ],
)
def test_what_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GrpoConfig(**fields)


def test_what_just_fits() -> None:
    assert GrpoConfig(max_tokens=19, arm="odc-split").longest == 38
    GrpoConfig(balance="verl", prompts=5, group=4, minibatches=2)


def test_the_toy_task() -> None:
    task = UpperHalf(vocab=20, count=3, length=5, seed=1, stops=4)
    assert task.prompts(2) == task.prompts(2) != task.prompts(3)
    assert all(4 <= token < 20 for prompt in task.prompts(0) for token in prompt)
    assert [len(prompt) for prompt in task.prompts(0)] == [5] * 3
    assert task.reward([], [10, 9, 19, 3]) == 0.5
    assert list(task.stop_ids) == [0, 1, 2, 3]
