"""verl's engines on tiny rows: how to build one, what rows look like, and a loss with metrics of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def rows(lengths: list[int], first: int, packed: bool = False, **settings: Any) -> Any:
    """Any number of rows, whose tokens follow from their number; the first two tokens are not predicted."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    ids, masks = [], []
    for number, length in enumerate(lengths, first):
        ids.append(torch.randint(4, 60, (length,), generator=torch.Generator().manual_seed(number)))
        masks.append((torch.arange(length) > 1).long())
    columns = {"input_ids": ids, "loss_mask": masks, "position_ids": [torch.arange(length) for length in lengths]}
    ends = torch.tensor([0, *lengths]).cumsum(0)
    whole = {name: torch.cat([torch.empty(0, dtype=torch.int64), *column]) for name, column in columns.items()}
    nested = {name: torch.nested.nested_tensor_from_jagged(column, ends) for name, column in whole.items()}
    data = TensorDict(nested, batch_size=[len(lengths)])
    tu.assign_non_tensor(data, use_remove_padding=packed, temperature=1.0, pad_token_id=0, **settings)
    return data


def build(
    model: Path,
    strategy: str,
    model_type: str = "language_model",
    odc: Any = None,
    of_model: Any = None,
    lr: float = 1e-2,
    **changes: Any,
) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    from odc.integrations.verl.config import OdcEngineConfig

    settings = {"mixed_precision": {"param_dtype": "fp32"}, "use_torch_compile": False, **changes}
    options: dict[str, Any] = {"enable_gradient_checkpointing": False, "use_remove_padding": False}
    options |= {"override_config": {"attn_implementation": "sdpa"}, **(of_model or {})}
    config = FSDPEngineConfig(strategy=strategy, **settings) if strategy != "odc" else None
    engine = EngineRegistry.new(
        model_type=model_type,
        backend=strategy,
        model_config=HFModelConfig(
            path=str(model),
            tokenizer_path=str(model / "tokenizer"),
            **options,
        ),
        engine_config=config or OdcEngineConfig(odc=odc or {}, **settings),
        optimizer_config=FSDPOptimizerConfig(lr=lr, lr_scheduler_type="constant", total_training_steps=9),
        checkpoint_config=CheckpointConfig(),
    )
    engine.model_config.model_type = model_type
    torch.manual_seed(0)  # of what no checkpoint holds
    engine.initialize()
    engine.computed = []  # rows of each microbatch
    step = engine.forward_step

    def forward_step(micro_batch: Any, **options: Any) -> Any:
        engine.computed.append(len(micro_batch))
        return step(micro_batch, **options)

    engine.forward_step = forward_step
    return engine


def loss_with_metrics(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """Verl's SFT loss, and metrics of each kind over this microbatch's predicted tokens."""
    from verl.utils.metric import Metric
    from verl.workers.utils.losses import sft_loss

    loss, _ = sft_loss(None, model_output, data)
    mask = data["loss_mask"].values().roll(-1).bool()  # position t predicts token t + 1
    likely = model_output["log_probs"].values()[mask].detach()
    return loss, {
        "mean": Metric("mean", likely.mean()),
        "sum": Metric("sum", loss),
        "max": Metric("max", float(mask.sum())),
        "plain": likely.mean().item(),
    }


def gathered(engine: Any, **options: Any) -> dict[str, torch.Tensor]:
    """All weights by the method of verl's own engine: a collective of all ranks for each parameter."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    weights, _ = FSDPEngine.get_per_tensor_param(engine, **options)
    return {name: value.clone() for name, value in weights}
