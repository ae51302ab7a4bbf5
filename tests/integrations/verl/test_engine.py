"""The engines against verl's fsdp2 engine on the same rows, on two CPU ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.verl import join_as_verl, needs_verl
from support.verl_engine import build, loss_with_metrics, rows

pytestmark = needs_verl

UNEVEN = [[60] * 4, [100, 10]]  # at 100 tokens a microbatch: four on rank 0, two on rank 1


def trained(
    rank: int,
    world: int,
    model: Path,
    strategy: str,
    lengths: list[list[int]],
    budget: int,
    odc: Any = None,
    changes: Any = None,
) -> dict[str, Any]:
    """Three steps; the last one's outcome, with the metrics as verl merges them over ranks."""
    join_as_verl(rank, world)
    from verl.utils.metric import Metric

    engine = build(model, strategy, odc=odc, **(changes or {}))
    packed = engine.use_remove_padding
    first = sum(len(some) for some in lengths[:rank])
    losses, norms = [], []
    for _ in range(3):
        engine.computed.clear()
        data = rows(lengths[rank], first, packed, use_dynamic_bsz=True, max_token_len_per_gpu=budget)
        with engine.train_mode():
            output = engine.train_batch(data, loss_with_metrics)
        loss = torch.tensor(sum(output["loss"]))
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        losses.append(loss.item())
        norms.append(output["metrics"].pop("grad_norm"))
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, output["metrics"])
    merged = {name: Metric.aggregate_dp([one[name] for one in gathered]) for name in ("mean", "sum", "max")}
    plain = [value for one in gathered for value in one["plain"]]
    weights = {name: value.sum().item() for name, value in engine.get_per_tensor_param()[0]}
    return {
        "loss": losses,
        "norm": norms,
        "computed": engine.computed,
        "metrics": merged,
        "plain": plain,
        "weights": weights,
    }


def alike(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-4)
    assert ours["weights"] == pytest.approx(theirs["weights"], rel=1e-3, abs=1e-3)


def test_unequal_counts_train_as_fsdp2_with_equal_ones(ranks, model) -> None:
    theirs = ranks(2).run(trained, model, "fsdp2", UNEVEN, 240)
    assert [len(one["computed"]) for one in theirs] == [1, 1]
    ours = ranks(2).run(trained, model, "odc", UNEVEN, 100, {"rebalance": False})
    assert [one["computed"] for one in ours] == [[1, 1, 1, 1], [1, 1]]
    alike(ours[0], theirs[0])
    # One microbatch a rank: verl's sum of losses, and its mean over ranks with unequal tokens.
    assert ours[0]["metrics"]["sum"] == pytest.approx(theirs[0]["metrics"]["sum"], rel=1e-4)
    assert ours[0]["metrics"]["max"] == 98


def test_means_are_over_all_tokens_whoever_computed_them(ranks, model) -> None:
    alone = ranks(2).run(trained, model, "odc", UNEVEN, 100, {"rebalance": False})
    moved = ranks(2).run(trained, model, "odc", UNEVEN, 100)
    for outcome in (alone[0], moved[0]):
        assert outcome["metrics"]["mean"] == pytest.approx(-outcome["loss"][-1], rel=1e-4)
        assert sum(outcome["plain"]) / 2 == pytest.approx(outcome["metrics"]["mean"], rel=1e-6)


def test_rebalanced_rows_train_to_the_same_weights(ranks, model) -> None:
    lengths = [[90, 80, 70], [8, 9, 10]]
    stay = ranks(2).run(trained, model, "odc", lengths, 100, {"rebalance": False})
    moved = ranks(2).run(trained, model, "odc", lengths, 100)
    assert [len(one["computed"]) for one in stay] == [3, 1]
    assert [len(one["computed"]) for one in moved] == [2, 2]
    assert [sum(one["computed"]) for one in moved] != [3, 3]
    alike(moved[0], stay[0])
    alike(moved[0], ranks(2).run(trained, model, "fsdp2", lengths, 300)[0])


@pytest.mark.parametrize(
    "changes",
    [{"of_model": {"use_remove_padding": True}}, {"of_model": {"lora_rank": 4}}, {"fsdp_size": 1}],
    ids=["packed", "LoRA", "hybrid sharding"],
)
def test_other_ways_to_train(ranks, model, changes) -> None:
    theirs = ranks(2).run(trained, model, "fsdp2", UNEVEN, 240, None, changes)
    ours = ranks(2).run(trained, model, "odc", UNEVEN, 100, None, changes)
    alike(ours[0], theirs[0])


def inferred(rank: int, world: int, model: Path, strategy: str) -> tuple[list[list[float]], int]:
    """Log-probabilities of this rank's rows after one step of training, and how many microbatches that took."""
    join_as_verl(rank, world)
    engine = build(model, strategy)
    data = partial(rows, UNEVEN[rank], 4 * rank, use_dynamic_bsz=True)
    for _ in range(2):
        engine.computed.clear()
        with engine.eval_mode():
            output = engine.infer_batch(data(max_token_len_per_gpu=100 if strategy == "odc" else 240))
        counted = len(engine.computed)
        with engine.train_mode():
            engine.train_batch(data(max_token_len_per_gpu=240), loss_with_metrics)
    return [row.tolist() for row in output["model_output"]["log_probs"].unbind()], counted


def test_inference_returns_rows_in_order_between_training_steps(ranks, model) -> None:
    theirs, ours = ranks(2).run(inferred, model, "fsdp2"), ranks(2).run(inferred, model, "odc")
    assert [count for _, count in ours] == [4, 2]
    for (their_rows, _), (our_rows, _) in zip(theirs, ours, strict=True):
        for their_row, our_row in zip(their_rows, our_rows, strict=True):
            # The last position predicts the first token of whatever row follows in the microbatch.
            assert our_row[:-1] == pytest.approx(their_row[:-1], rel=1e-3, abs=1e-4)


def looked_at(rank: int, world: int, model: Path, strategy: str, changes: dict[str, Any]) -> list[list[float]]:
    """Log-probabilities of this rank's rows, by a model as it was loaded."""
    join_as_verl(rank, world)
    engine = build(model, strategy, **changes)
    with engine.eval_mode():
        output = engine.infer_batch(rows(UNEVEN[rank], 4 * rank, use_dynamic_bsz=True, max_token_len_per_gpu=240))
    return [row.tolist() for row in output["model_output"]["log_probs"].unbind()]


def test_a_reference_model_only_looks(ranks, model) -> None:
    theirs = ranks(2).run(looked_at, model, "fsdp2", {})
    ours = ranks(2).run(looked_at, model, "odc", {"forward_only": True, "model_dtype": "fp32"})
    for their_rows, our_rows in zip(theirs, ours, strict=True):
        for their_row, our_row in zip(their_rows, our_rows, strict=True):
            assert our_row[:-1] == pytest.approx(their_row[:-1], rel=1e-4)


def value_loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    values = model_output["values"].values()
    return ((values - 1) ** 2).sum() / data["batch_num_tokens"] * data["dp_size"], {}


def critic(rank: int, world: int, model: Path, strategy: str) -> list[float]:
    join_as_verl(rank, world)
    engine = build(model, strategy, "value_model")
    norms = []
    for _ in range(2):
        data = rows(UNEVEN[rank], 4 * rank, use_dynamic_bsz=True, max_token_len_per_gpu=240)
        with engine.train_mode():
            norms.append(engine.train_batch(data, value_loss)["metrics"]["grad_norm"])
    return norms


def test_value_head(ranks, model) -> None:
    theirs, ours = ranks(2).run(critic, model, "fsdp2"), ranks(2).run(critic, model, "odc")
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4)


def fixed_size(rank: int, world: int, model: Path, strategy: str) -> tuple[int, float]:
    join_as_verl(rank, world)
    engine = build(model, strategy)
    data = rows([20, 30, 40, 50], 4 * rank, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    with engine.train_mode():
        output = engine.train_batch(data, loss_with_metrics)
    return len(engine.computed), output["metrics"]["grad_norm"]


def test_microbatches_of_a_fixed_number_of_samples(ranks, model) -> None:
    theirs, ours = ranks(2).run(fixed_size, model, "fsdp2"), ranks(2).run(fixed_size, model, "odc")
    assert ours[0] == (2, pytest.approx(theirs[0][1], rel=1e-4))


def too_long(rank: int, world: int, model: Path) -> str:
    from odc.errors import PlanError

    join_as_verl(rank, world)
    engine = build(model, "odc")
    with pytest.raises(PlanError) as caught, engine.train_mode():
        engine.train_batch(
            rows([9, [50, 101][rank]], 0, use_dynamic_bsz=True, max_token_len_per_gpu=100), loss_with_metrics
        )
    return str(caught.value)


def test_a_sample_over_the_budget_is_named_on_every_rank(ranks, model) -> None:
    for message in ranks(2).run(too_long, model):
        assert message.startswith("data-parallel rank 1: sample 1 (1 together) has 101 tokens, more than")


def refused_option(rank: int, world: int, model: Path, changes: dict[str, Any]) -> str:
    from odc.errors import UnsupportedError

    join_as_verl(rank, world)
    with pytest.raises(UnsupportedError) as caught:
        build(model, "odc", **changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"param_offload": True}, "param_offload"),
        ({"offload_policy": True}, "offload_policy"),
        ({"mixed_precision": {"param_dtype": "fp16"}}, "mixed_precision.param_dtype=fp16"),
    ],
)
def test_what_is_not_supported_is_refused(ranks, model, changes, name) -> None:
    assert ranks(2).run(refused_option, model, changes) == [f"strategy odc does not support {name}"] * 2
