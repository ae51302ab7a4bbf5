"""The engines against verl's fsdp2 engine on the same rows, on two CPU ranks."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankPool
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
        data = rows(
            lengths[rank],
            first,
            packed,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=budget,
            use_fused_kernels=engine.model_config.use_fused_kernels,
        )
        with engine.train_mode():
            output = engine.train_batch(data, loss_with_metrics)
        loss = torch.tensor(float(sum(output["loss"])))
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        losses.append(loss.item())
        norms.append(output["metrics"].pop("grad_norm"))
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, output["metrics"])
    merged = {name: Metric.aggregate_dp([one[name] for one in gathered if one]) for name in ("mean", "sum", "max")}
    plain = [value for one in gathered if one for value in one["plain"]]
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


@pytest.mark.parametrize(("rebalance", "computed"), [(False, [[1] * 4, []]), (True, [[1] * 2] * 2)])
def test_a_rank_without_rows_trains_as_fsdp2_with_some_on_each(ranks, model, rebalance, computed) -> None:
    """No trainer of verl deals them so: each rank gets equally many."""
    theirs = ranks(2).run(trained, model, "fsdp2", [[60] * 2] * 2, 240)
    ours = ranks(2).run(trained, model, "odc", [[60] * 4, []], 100, {"rebalance": rebalance})
    assert [one["computed"] for one in ours] == computed
    alike(ours[0], theirs[0])


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


def test_fused_kernels_train_as_the_model_does_without_them(ranks, actor: RankPool, model) -> None:
    """They read the weight of the head without calling it. verl patches the model's class, so its processes end."""
    of_model = {
        "use_remove_padding": True,
        "use_fused_kernels": True,
        "fused_kernel_options": {"impl_backend": "torch"},
    }
    ours = actor.run(trained, model, "odc", UNEVEN, 100, None, {"of_model": of_model})
    plain = {"of_model": {"use_remove_padding": True}}
    alike(ours[0], ranks(2).run(trained, model, "odc", UNEVEN, 100, None, plain)[0])


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


def memory(rank: int, world: int, model: Path, forward_only: bool) -> int:
    """Bytes of a rank's accumulators, beyond the least that each has."""
    from odc.fsdp import root_of

    join_as_verl(rank, world)
    layout = root_of(build(model, "odc", forward_only=forward_only).module).layout
    return int(layout.ledger()["accumulator"]) - 64 * len(layout.units)


def test_a_reference_model_has_no_memory_for_gradients(ranks, model) -> None:
    assert ranks(2).run(memory, model, False)[0] > 0 == ranks(2).run(memory, model, True)[0]


def test_a_reference_model_only_looks(ranks, model) -> None:
    theirs = ranks(2).run(looked_at, model, "fsdp2", {})
    ours = ranks(2).run(looked_at, model, "odc", {"forward_only": True, "model_dtype": "fp32"})
    for their_rows, our_rows in zip(theirs, ours, strict=True):
        for their_row, our_row in zip(their_rows, our_rows, strict=True):
            assert our_row[:-1] == pytest.approx(their_row[:-1], rel=1e-4)


def under_ray(rank: int, world: int, model: Path) -> list[int]:
    """The ranks on other hosts that this one watches, under the variables of a worker on Ray."""
    from odc.hosts.watch import neighbours

    join_as_verl(rank, world)
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "RAY_LOCAL_WORLD_SIZE": str(world)}
    build(model, "odc")
    return neighbours(rank, world)


def test_a_job_on_one_host_watches_no_other_host_under_ray(actor: RankPool, model) -> None:
    """There verl sets LOCAL_WORLD_SIZE to 1."""
    assert actor.run(under_ray, model) == [[], []]


def distilled(rank: int, world: int, model: Path, strategy: str) -> list[float]:
    """Loss and gradient norm of two steps toward the likeliest tokens of a teacher."""
    join_as_verl(rank, world)
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import ActorConfig, DistillationConfig, DistillationLossConfig

    of_loss = {"loss_mode": "forward_kl_topk", "topk": 3, "use_task_rewards": False, "use_policy_gradient": False}
    loss = partial(
        distillation_ppo_loss,
        config=ActorConfig(strategy=strategy, ppo_micro_batch_size_per_gpu=1, rollout_n=1),
        distillation_config=DistillationConfig(distillation_loss=DistillationLossConfig(**of_loss)),
    )
    engine, found = build(model, strategy), []
    if strategy == "odc":
        from odc.integrations.verl.engine import _as_of_fsdp

        assert _as_of_fsdp(loss).keywords["config"].strategy == "fsdp", "all that verl 0.9.0 distils beside veomni"
    budget = 100 if strategy == "odc" else 240
    for _ in range(2):
        data = rows(UNEVEN[rank], 4 * rank, use_dynamic_bsz=True, max_token_len_per_gpu=budget)
        columns: dict[str, list[torch.Tensor]] = {"prompts": [], "responses": [], "response_mask": []}
        columns |= {"teacher_ids": [], "teacher_logprobs": []}
        for ids in data["input_ids"].unbind():
            columns["prompts"].append(ids[:2])
            columns["responses"].append(ids[2:])
            columns["response_mask"].append(torch.ones_like(ids[2:]))
            columns["teacher_ids"].append(torch.stack([ids, ids + 1, ids + 2], 1) % 60)
            columns["teacher_logprobs"].append(torch.tensor([0.5, 0.3, 0.1]).log().expand(len(ids), 3).contiguous())
        for name, column in columns.items():
            data[name] = torch.nested.as_nested_tensor(column, layout=torch.jagged)
        tu.assign_non_tensor(data, distillation_use_topk=True, global_batch_size=6)
        with engine.train_mode():
            output = engine.train_batch(data, loss)
        whole = torch.tensor(sum(output["loss"]))
        dist.all_reduce(whole, op=dist.ReduceOp.AVG)
        found += [whole.item(), output["metrics"]["grad_norm"]]
    return found


def test_the_likeliest_tokens_of_a_teacher_are_distilled(ranks, model) -> None:
    theirs, ours = (ranks(2).run(distilled, model, strategy)[0] for strategy in ("fsdp2", "odc"))
    assert ours == pytest.approx(theirs, rel=1e-4)


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


def offloaded(rank: int, world: int, model: Path) -> bool:
    join_as_verl(rank, world)
    return build(model, "odc", param_offload=True, forward_only=True).is_param_offload_enabled


def test_a_reference_that_fsdp2_would_offload_stays_where_it_is(ranks, model) -> None:
    assert ranks(2).run(offloaded, model) == [False, False]


def weighed(rank: int, world: int, model: Path, strategy: str, weight: float) -> tuple[float, float]:
    """Loss and gradient norm of a step whose tokens have a weight."""
    join_as_verl(rank, world)
    engine = build(model, strategy)
    data = rows(UNEVEN[rank], 4 * rank, use_dynamic_bsz=True, max_token_len_per_gpu=240)
    data["loss_mask"] = data["loss_mask"] * weight
    with engine.train_mode():
        output = engine.train_batch(data, loss_with_metrics)
    loss = torch.tensor(sum(output["loss"]))
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss.item(), float(output["metrics"]["grad_norm"])


@pytest.mark.parametrize("weight", [0.3, 0.002], ids=["many tokens' worth", "less than one"])
def test_weighted_tokens_are_counted_by_their_weights(ranks, model, weight: float) -> None:
    theirs = ranks(2).run(weighed, model, "fsdp2", weight)[0]
    assert ranks(2).run(weighed, model, "odc", weight)[0] == pytest.approx(theirs, rel=1e-4)
