"""Cost models against counts made by hand."""

from __future__ import annotations

import pytest

from odc.balance import cost_from_config, lb_mini, linear_cost, quadratic, transformer_cost
from odc.errors import PlanError

CONFIG = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_linear_and_quadratic():
    assert linear_cost(7) == 7.0
    assert quadratic(2, 3)(10) == 2 * 10 + 3 * 100


@pytest.mark.parametrize("coefficients", [(-1, 1), (1, -1), (0, 0), (float("nan"), 1)])
def test_quadratic_refuses(coefficients: tuple[float, float]):
    with pytest.raises(PlanError):
        quadratic(*coefficients)


def flops_by_matmuls(length: int) -> float:
    """Forward FLOPs of CONFIG's model, matmul by matmul: 4 query heads and 2 key/value heads of size 2."""

    def matmul(m: int, k: int, n: int) -> int:
        return 2 * m * k * n

    layer = matmul(length, 8, 8) * 2 + matmul(length, 8, 4) * 2 + matmul(length, 8, 16) * 2 + matmul(length, 16, 8)
    attention = 4 * (matmul(length, 2, length) + matmul(length, length, 2)) / 2
    return 2 * (layer + attention) + matmul(length, 8, 32)


@pytest.mark.parametrize("length", [1, 100, 4096])
def test_transformer_cost_counts_matmuls(length: int):
    cost = cost_from_config(CONFIG)
    assert cost == transformer_cost(8, 2, 16, 32, heads=4, kv_heads=2)
    assert cost(length) == pytest.approx(3 * flops_by_matmuls(length))


def test_checkpointing_runs_layers_once_more_but_not_the_head():
    plain, twice = cost_from_config(CONFIG), cost_from_config(CONFIG, checkpointing=True)
    head = 2 * 8 * 32
    assert twice(1000) - plain(1000) == pytest.approx(flops_by_matmuls(1000) - head * 1000)


def test_explicit_head_size_and_two_matrix_mlp():
    assert transformer_cost(8, 1, 16, 32, heads=4, head_dim=8).b == 3 * 2 * 32
    assert transformer_cost(8, 1, 16, 32).a - transformer_cost(8, 1, 16, 32, gated=False).a == 3 * 2 * 8 * 16


def test_bad_configs_are_refused():
    with pytest.raises(PlanError, match="intermediate_size"):
        cost_from_config({k: v for k, v in CONFIG.items() if k != "intermediate_size"})
    with pytest.raises(PlanError, match="experts"):
        cost_from_config({**CONFIG, "num_experts": 8})
    with pytest.raises(PlanError, match="layers"):
        transformer_cost(8, 0, 16, 32)


def test_policies_refuse_costs_that_are_not_numbers():
    with pytest.raises(PlanError, match=r"cost of sample 1 \(3 tokens\)"):
        lb_mini([2, 3], 1, 8, cost=lambda length: float("nan") if length == 3 else 1.0)
