"""FLOPs against counts made matmul by matmul."""

from __future__ import annotations

from typing import Any

import pytest

from odc.balance import cost_from_config, cost_of, linear_cost, quadratic, transformer_cost
from odc.errors import PlanError

CONFIG: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def matmul(m: int, k: int, n: int) -> int:
    return 2 * m * k * n


def attention(length: int, window: int | None = None) -> float:
    """Scores and values of one layer with 4 heads of 2, pair by pair of tokens; halves where a token meets itself."""
    pairs = 0.0
    for i in range(length):
        seen = min(i + 1, window or length)
        pairs += seen - 0.5
    return 4 * 2 * 2 * 2 * pairs


def flops(length: int, mlps: list[int], windows: list[int | None]) -> float:
    """Forward FLOPs of CONFIG's model with `mlps` (multiply-adds a token) in place of its own."""
    layers = sum(
        2 * matmul(length, 8, 8) + 2 * matmul(length, 8, 4) + 2 * length * mlp + attention(length, window)
        for mlp, window in zip(mlps, windows, strict=True)
    )
    return layers + matmul(length, 8, 32)


DENSE = 3 * 8 * 16


@pytest.mark.parametrize("length", [1, 100, 777])
def test_dense(length: int) -> None:
    cost = cost_from_config(CONFIG)
    assert cost == transformer_cost(8, 2, 16, 32, heads=4, kv_heads=2)
    assert cost(length) == pytest.approx(3 * flops(length, [DENSE] * 2, [None] * 2))


@pytest.mark.parametrize("length", [3, 40, 41, 500])
@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 40}, [40, 40]),
        ({"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}, [40, None]),
        ({"sliding_window": 40, "sliding_window_pattern": 2}, [40, None]),
        ({"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 1}, [None, 40]),
        ({"sliding_window": 40, "use_sliding_window": False}, [None, None]),
        ({"sliding_window": None}, [None, None]),
    ],
)
def test_sliding_windows(length: int, fields: dict[str, Any], windows: list[int | None]) -> None:
    cost = cost_from_config(CONFIG | fields)
    # A window's edge is counted as a straight line: half a pair a token.
    slack = 3 * 2 * 4 * 2 * 2 * length
    assert cost(length) == pytest.approx(3 * flops(length, [DENSE] * 2, windows), abs=slack)


@pytest.mark.parametrize(
    ("fields", "mlps"),
    [
        ({"num_local_experts": 4, "num_experts_per_tok": 2}, [8 * 4 + 2 * DENSE] * 2),
        ({"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 4}, [8 * 6 + 3 * 3 * 8 * 4] * 2),
        (
            {
                "num_experts": 6,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 4,
                "shared_expert_intermediate_size": 5,
                "mlp_only_layers": [0],
            },
            [DENSE, 8 * 6 + 3 * 8 * (4 + 5)],
        ),
        (
            {
                "n_routed_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 4,
                "n_shared_experts": 2,
                "first_k_dense_replace": 1,
            },
            [DENSE, 8 * 6 + 3 * 8 * (8 + 8)],
        ),
        (
            {
                "moe_num_experts": 6,
                "moe_k": 2,
                "moe_intermediate_size": 4,
                "moe_num_shared_experts": 1,
                "moe_layer_start_index": 0,
                "moe_layer_end_index": 0,
            },
            [8 * 6 + 3 * 8 * (8 + 4), DENSE],
        ),
        (
            {"num_experts": 6, "num_experts_per_tok": 2, "mlp_layer_types": ["sparse", "dense"]},
            [8 * 6 + 2 * DENSE, DENSE],
        ),
        (
            {"num_experts": 6, "num_experts_per_tok": 2, "decoder_sparse_step": 2, "moe_intermediate_size": 4},
            [DENSE, 8 * 6 + 3 * 8 * 8],
        ),
    ],
)
def test_experts(fields: dict[str, Any], mlps: list[int]) -> None:
    cost = cost_from_config(CONFIG | fields)
    assert cost(100) == pytest.approx(3 * flops(100, mlps, [None] * 2))


def test_checkpointing_runs_layers_once_more_but_not_the_head() -> None:
    fields = CONFIG | {"sliding_window": 40}
    plain, twice = cost_from_config(fields), cost_from_config(fields, checkpointing=True)
    assert twice(1000) - plain(1000) == pytest.approx((plain(1000) - 3 * matmul(1000, 8, 32)) / 3)


def test_two_matrices_explicit_head_and_text_config() -> None:
    gated, plain = cost_from_config(CONFIG), cost_from_config(CONFIG | {"model_type": "gpt_neox"})
    assert gated.a - plain.a == 3 * 2 * 2 * 8 * 16
    assert transformer_cost(8, 1, 16, 32, heads=4, head_dim=8).b == 3 * 2 * 32
    assert cost_from_config({"text_config": CONFIG, "vision_config": {}}) == gated


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_lora_rank": 4}, "latent"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"num_experts": 4}, "num_experts_per_tok"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "5 of 4 experts"),
        ({"num_hidden_layers": 0}, "layers"),
        ({"num_key_value_heads": -4}, "kv_heads >= 1, got -4"),
        ({"head_dim": -2}, "head_dim >= 1, got -2"),
        ({"sliding_window": 0}, "windows"),
        ({"hidden_size": [8, 8]}, "no number as its 'hidden_size'"),
        ({"intermediate_size": [16, None]}, "intermediate_size"),
        ({"intermediate_size": []}, "no number as its 'intermediate_size'"),
        ({"mamba_d_state": 16}, "state-space"),
        ({"attn_layer_indices": [1]}, "attention in some layers"),
        ({"lru_width": 8}, "recurrent"),
        ({"block_types": ["recurrent", "attention"]}, "recurrent"),
    ],
)
def test_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        cost_from_config(CONFIG | fields)


def test_other_names_for_the_same_sizes() -> None:
    gpt2 = {"n_embd": 8, "n_layer": 2, "n_head": 4, "vocab_size": 32, "model_type": "gpt2"}
    plain = transformer_cost(8, 2, 32, 32, heads=4, gated=False)
    assert cost_from_config(gpt2) == cost_from_config(gpt2 | {"n_inner": None}) == plain
    assert cost_from_config(gpt2 | {"n_inner": 24}) == transformer_cost(8, 2, 24, 32, heads=4, gated=False)
    bigcode = gpt2 | {"model_type": "gpt_bigcode", "multi_query": True}
    assert cost_from_config(bigcode) == transformer_cost(8, 2, 32, 32, heads=4, kv_heads=1, gated=False)
    opt = {key: value for key, value in CONFIG.items() if not key.startswith(("intermediate", "num_key"))}
    assert cost_from_config(opt | {"model_type": "opt", "ffn_dim": 32}) == plain
    with pytest.raises(PlanError, match="intermediate_size"):
        cost_from_config(gpt2 | {"model_type": "ctrl"})


def test_widths_layer_by_layer_count_by_their_mean() -> None:
    cost = cost_from_config(CONFIG | {"intermediate_size": [10, 21]})
    assert cost(100) == pytest.approx(3 * flops(100, [3 * 8 * 10, 3 * 8 * 21], [None] * 2))


def test_models_that_cannot_be_counted_are_balanced_by_tokens(caplog: pytest.LogCaptureFixture) -> None:
    assert cost_of(CONFIG, checkpointing=True) == cost_from_config(CONFIG, checkpointing=True)
    assert not caplog.records
    assert cost_of({"d_model": 8}) is linear_cost
    (record,) = caplog.records
    assert record.getMessage() == (
        "samples are balanced by tokens alone, not by FLOPs: "
        "the model's config has no 'hidden_size', which the cost model needs"
    )
    other = quadratic(1, 1)
    assert cost_of(CONFIG | {"intermediate_size": "wide"}, otherwise=other) is other


def test_a_size_that_is_no_number_is_refused() -> None:
    with pytest.raises(PlanError, match="hidden >= 1, got '8'"):
        transformer_cost("8", 2, 16, 32)  # type: ignore[arg-type]


def test_a_missing_key_is_named() -> None:
    with pytest.raises(PlanError, match="intermediate_size"):
        cost_from_config({key: value for key, value in CONFIG.items() if key != "intermediate_size"})


@pytest.mark.parametrize(
    "odd",
    [
        {"layer_types": 7},
        {"layer_types": [["full"]]},
        {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": 3},
        {"sliding_window": 8, "sliding_window_pattern": 0.5},
    ],
)
def test_fields_of_another_type_are_no_model_that_is_known(odd: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="does not understand the model's config"):
        cost_from_config(CONFIG | odd)
