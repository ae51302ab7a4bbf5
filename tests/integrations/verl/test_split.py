"""Rows as pieces on two CPU ranks, against verl's fsdp2 engine with room for whole rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.verl import import_verl, join_as_verl, needs_verl
from support.verl_engine import build, loss_with_metrics, rows

from odc.errors import PlanError, UnsupportedError

pytestmark = needs_verl

# Lengths of a step's rows on each rank, and the tokens of a microbatch: one row needs two ranks. The second needs more
# room than was made for the first.
STEPS = [([[151, 20, 9], [30, 12]], 100), ([[31, 9, 8], [305, 20]], 160)]
PROMPT = 5


def answered(lengths: list[int], first: int, **settings: Any) -> Any:
    """Rows of a prompt and a response, as verl's actor learns from them."""
    from verl.utils import tensordict_utils as tu

    data = rows(lengths, first, **settings)
    tokens = data["input_ids"].unbind()
    columns: dict[str, list[torch.Tensor]] = {"prompts": [], "responses": [], "response_mask": []}
    columns |= {"old_log_probs": [], "ref_log_prob": [], "advantages": []}
    for number, ids in enumerate(tokens, first):
        draw = torch.Generator().manual_seed(100 + number)
        size = len(ids) - PROMPT
        columns["prompts"].append(ids[:PROMPT])
        columns["responses"].append(ids[PROMPT:])
        columns["response_mask"].append((torch.rand(size, generator=draw) < 0.8).long())
        for name in ("old_log_probs", "ref_log_prob"):
            columns[name].append(-4 + torch.randn(size, generator=draw) / 4)
        columns["advantages"].append(torch.randn(size, generator=draw))
    for name, column in columns.items():
        data[name] = torch.nested.as_nested_tensor(column, layout=torch.jagged)
    data["loss_mask"] = data["response_mask"]
    tu.assign_non_tensor(data, calculate_entropy=True, global_batch_size=5)
    return data


def actor_loss(**changes: Any) -> Any:
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    given = {"ppo_micro_batch_size_per_gpu": 1, "use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.1}
    return partial(ppo_loss, config=ActorConfig(**given | {"strategy": "odc", "rollout_n": 1, **changes}))


def masked_value_loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    mask = data["loss_mask"].values().roll(-1)
    errors = (model_output["values"].values() - 1) ** 2 * mask
    return errors.sum() / data["batch_num_tokens"] * data["dp_size"], {}


def trained(
    rank: int, world: int, model: Path, strategy: str, kind: str, of_model: dict[str, Any]
) -> dict[str, list[Any]]:
    """Of each step loss, norm, rows of each microbatch, and metrics as verl merges them; the weights at the end."""
    join_as_verl(rank, world)
    from verl.utils.metric import Metric

    options = {"split": True} if strategy == "odc" else None
    engine = build(model, strategy, "value_model" if kind == "critic" else "language_model", options, of_model)
    make = answered if kind == "actor" else rows
    loss_of = {"actor": actor_loss, "critic": lambda: masked_value_loss, "sft": lambda: loss_with_metrics}[kind]()
    found: dict[str, list[Any]] = {"loss": [], "norm": [], "computed": [], "metrics": []}
    for lengths, budget in STEPS:
        engine.computed.clear()
        settings = {"use_dynamic_bsz": True, "max_token_len_per_gpu": budget if strategy == "odc" else 400}
        first = sum(len(some) for some in lengths[:rank])
        data = make(lengths[rank], first, packed=engine.use_remove_padding, **settings)
        with engine.train_mode():
            output = engine.train_batch(data, loss_of)
        loss = torch.tensor(sum(output["loss"]))
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        found["loss"].append(loss.item())
        found["norm"].append(output["metrics"].pop("grad_norm"))
        found["computed"].append(list(engine.computed))
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, output["metrics"])
        names = [name for name, one in output["metrics"].items() if isinstance(one, Metric)]
        found["metrics"].append({name: Metric.aggregate_dp([one[name] for one in gathered]) for name in names})
    return found | {"weights": {name: value.sum().item() for name, value in engine.get_per_tensor_param()[0]}}


def alike(ours: list[dict[str, list[Any]]], theirs: list[dict[str, list[Any]]]) -> None:
    for step in range(len(STEPS)):
        assert [one["computed"][step][0] for one in ours] == [1, 1], "pieces come first"
        assert sum(sum(one["computed"][step]) for one in ours) == 6, "one row of five on both ranks"
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=1e-5)
    assert ours[0]["norm"] == pytest.approx(theirs[0]["norm"], rel=1e-4)
    assert ours[0]["weights"] == pytest.approx(theirs[0]["weights"], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("changes", ["use_remove_padding", "enable_gradient_checkpointing"])
def test_fine_tuning_with_a_row_in_pieces(ranks, model, changes) -> None:
    theirs = ranks(2).run(trained, model, "fsdp2", "sft", {changes: True})
    ours = ranks(2).run(trained, model, "odc", "sft", {changes: True})
    alike(ours, theirs)
    for step, loss in enumerate(ours[0]["loss"]):
        assert ours[0]["metrics"][step]["mean"] == pytest.approx(-loss, rel=1e-4), "over all tokens, once each"


def test_an_actor_learns_from_pieces(ranks, model) -> None:
    theirs = ranks(2).run(trained, model, "fsdp2", "actor", {})
    ours = ranks(2).run(trained, model, "odc", "actor", {})
    alike(ours, theirs)
    for mine, other in zip(ours[0]["metrics"], theirs[0]["metrics"], strict=True):
        summed = [name for name in other if name.endswith("loss")]
        assert len(summed) == 3, "of the policy, the entropy and the reference"
        for name in summed:
            assert mine[name] == pytest.approx(other[name], rel=1e-4)


def test_a_critic_learns_from_pieces(ranks, model) -> None:
    theirs = ranks(2).run(trained, model, "fsdp2", "critic", {})
    alike(ranks(2).run(trained, model, "odc", "critic", {}), theirs)


def test_a_padded_row_is_masked_as_verl_pads_it() -> None:
    import_verl()
    from tensordict import TensorDict

    from odc.integrations.verl.pieces import masked
    from odc.split.cut import Cut

    ids = torch.nested.as_nested_tensor([torch.arange(8)], layout=torch.jagged)
    row = TensorDict({"input_ids": ids, "position_ids": ids.clone()}, batch_size=[1])
    row["prompts"], row["responses"] = torch.zeros(1, 5), torch.zeros(1, 6)  # three and five tokens, and padding
    row["attention_mask"] = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0]])
    row["response_mask"] = torch.tensor([[True] * 5 + [False]])
    row["old_log_probs"] = torch.arange(1.0, 7)[None]
    row["reward"] = torch.tensor([2.5])
    pieces = Cut([[(0, 2), (6, 8)], [(2, 6)]])
    first, second = (masked(SimpleNamespace(cut=pieces, place=place), row) for place in range(2))  # type: ignore[arg-type]
    # Token i is predicted by position i - 1; the response begins with token 3.
    assert first["response_mask"].tolist() == [[False, False, False, False, True, False]]
    assert second["response_mask"].tolist() == [[True, True, True, True, False, False]]
    assert second["old_log_probs"].tolist() == [[1, 2, 3, 4, 0, 0]]
    assert first["reward"] == 2.5 and torch.equal(first["attention_mask"], row["attention_mask"])
    assert row["old_log_probs"].tolist() == [[1, 2, 3, 4, 5, 6]], "peers' rows are as they were"


def test_every_rank_needs_a_row() -> None:
    import_verl()
    from odc.balance import linear_cost
    from odc.integrations.verl.pieces import RowPieces

    rows_of = RowPieces(None, keep=True, node=3, timeout_s=60.0)
    assert rows_of.most(3) == rows_of.most(4) == 2
    assert rows_of.plan([[90], [80], [70]], 100, linear_cost) is None
    assert rows_of.plan([[150], [80], [70]], 100, linear_cost) is not None
    with pytest.raises(PlanError, match="leaves data-parallel rank 2 without a row: 3 of 3 rows are split"):
        rows_of.plan([[150], [150], [150]], 100, linear_cost)


def patience(rank: int, world: int, model: Path) -> float:
    """How long pieces wait for each other, in seconds."""
    join_as_verl(rank, world)
    from odc.balance import linear_cost
    from odc.integrations.verl import pieces

    rows_of = build(model, "odc", odc={"split": True, "timeout_s": 123.0})._rows
    with mock.patch.object(pieces, "Splitter") as made:
        rows_of.prepare(rows_of.plan([[151], [20, 30]], 100, linear_cost), 100)
    return float(made.call_args.kwargs["timeout_s"])


def test_pieces_wait_as_long_as_the_settings_say(ranks, model) -> None:
    assert ranks(2).run(patience, model) == [123.0, 123.0]


def refused(rank: int, world: int, model: Path) -> list[str]:
    join_as_verl(rank, world)
    found = []

    def refuse(length: int, make: Any = rows, loss_of: Any = loss_with_metrics, **settings: Any) -> None:
        data = make([9, length], 0, **{"use_dynamic_bsz": True, "max_token_len_per_gpu": 100, **settings})
        with pytest.raises((PlanError, UnsupportedError)) as caught, engine.train_mode():
            engine.train_batch(data, loss_of)
        found.append(str(caught.value))

    engine = build(model, "odc", odc={"split": True})
    refuse(201)
    refuse(101, return_model_output=True)
    refuse(50, force_group_size=2)
    refuse(50, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    for changes in ({"pad_to_length": True, "pad_to_length_bucket": 8}, {"of_model": {"use_fused_kernels": True}}):
        with pytest.raises(UnsupportedError) as caught:
            build(model, "odc", odc={"split": True}, **changes)
        found.append(str(caught.value))
    engine = build(model, "odc")
    refuse(50, answered, actor_loss(loss_agg_mode="seq-mean-token-sum-norm"))
    return found


def test_what_cannot_be_split_is_refused_on_every_rank(ranks, model) -> None:
    one, other = ranks(2).run(refused, model)
    assert one == other
    assert one[0].startswith("data-parallel rank 0: sample 1 (1 together) has 201 tokens, more than a microbatch may")
    assert one[0].endswith("in 2 pieces)") and "in 2 pieces" not in one[1] and "has 101 tokens" in one[1]
    names = ["force_group_size > 1", "use_dynamic_bsz=false", "pad_to_length", "use_fused_kernels"]
    assert one[2:-1] == [f"engine.odc.split=true does not go with {name}" for name in names]
    assert one[-1].startswith("strategy odc does not go with loss_agg_mode=seq-mean-token-sum-norm without loss_scale")


def test_losses_that_are_no_sums_over_tokens_are_refused() -> None:
    import_verl("verl.workers.config")
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import DistillationConfig, DistillationLossConfig, PolicyLossConfig

    from odc.integrations.verl.pieces import refuse_batch, refuse_options

    data = rows([9], 0)
    refuse_batch(data, actor_loss(loss_agg_mode="seq-mean-token-sum"))
    refuse_batch(data, loss_with_metrics)
    for changes, name in (
        ({"loss_agg_mode": "seq-mean-token-mean"}, "loss_agg_mode=seq-mean-token-mean: it is a mean over the tokens"),
        ({"policy_loss": PolicyLossConfig(loss_mode="gspo")}, "loss_mode=gspo: it is not a sum over tokens"),
    ):
        with pytest.raises(UnsupportedError, match=name):
            refuse_batch(data, actor_loss(**changes))
    estimated = DistillationConfig(distillation_loss=DistillationLossConfig(loss_mode="k1"))
    with pytest.raises(UnsupportedError, match="distillation"):
        refuse_batch(data, partial(distillation_ppo_loss, **actor_loss().keywords, distillation_config=estimated))
    tu.assign_non_tensor(data, distillation_use_topk=True)
    with pytest.raises(UnsupportedError, match="distillation"):
        refuse_batch(data, loss_with_metrics)
    engine = SimpleNamespace(ulysses_sequence_parallel_size=2, pad_to_length=False)
    with pytest.raises(UnsupportedError, match="ulysses_sequence_parallel_size > 1"):
        refuse_options(SimpleNamespace(use_fused_kernels=False), engine)


def test_losses_that_depend_on_which_rows_share_a_microbatch_are_refused() -> None:
    import_verl("verl.workers.config")
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import PolicyLossConfig

    from odc.integrations.verl.rebalance import refuse_losses

    data, mode = answered([9, 30], 0), "seq-mean-token-sum-norm"
    with pytest.raises(UnsupportedError, match="actor.loss_scale_factor"):
        refuse_losses(data, actor_loss(loss_agg_mode=mode))
    refuse_losses(data, actor_loss(loss_agg_mode=mode, loss_scale_factor=64))
    refuse_losses(data, actor_loss())
    refuse_losses(rows([9], 0), loss_with_metrics)
    corrected = {"rollout_is": "token", "rollout_is_batch_normalize": True}
    bypass = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=corrected)
    means = actor_loss(policy_loss=PolicyLossConfig(loss_mode="geo_mean"))
    for loss, name in ((means, "geo_mean"), (actor_loss(policy_loss=bypass), "rollout_is_batch_normalize")):
        with pytest.raises(UnsupportedError, match=name):
            refuse_losses(data, loss)
    corrected["rollout_is_batch_normalize"] = False
    refuse_losses(data, actor_loss(policy_loss=PolicyLossConfig("bypass_mode", rollout_correction=corrected)))
    padded = data.copy()
    padded["response_mask"] = data["response_mask"].to_padded_tensor(0)
    refuse_losses(padded, actor_loss(loss_agg_mode=mode))
    tu.assign_non_tensor(data, use_dynamic_bsz=False)  # verl's own microbatches
    refuse_losses(data, actor_loss(loss_agg_mode=mode))
    refuse_losses(data, means)
