"""The model, sharded as the arm wants it, and its optimizer.

Chose to build and shard inside one function so that the order that matters (loss, then checkpointing, then sharding,
then optimizer) stands in one place. Units are the model's blocks and, as one more, everything else: embedding, last
norm and head, which are small beside a block's activations and often share a weight.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from odc.arms import Arm
from odc.balance import Cost, cost_from_config
from odc.blocks import blocks_of
from odc.experiments.arms import shard_model
from odc.experiments.config import JobConfig
from odc.experiments.preflight import model_source
from odc.experiments.text.loss import use_document_loss
from odc.experiments.text.model import build_model, config_of


def build_sharded(config: JobConfig, arm: Arm, vocab_size: int, device: torch.device) -> tuple[Any, AdamW]:
    """The job's model, sharded over the world, and AdamW over it. On every rank; no collective but a mesh's.

    Weights are drawn on the CPU, the same bits in every arm, and moved to `device` whole. Parameters are fp32; under
    "bf16" compute is in bf16 and gradients are reduced in fp32. Vectors (norms, biases) get no weight decay.
    """
    model = build_model(model_source(config.model), vocab_size=vocab_size, dtype=torch.float32, seed=config.seed)
    use_document_loss(model)
    model.to(device)
    blocks = blocks_of(model)
    if config.activation_checkpointing:
        for block in blocks:
            _recompute(block)
    options: dict[str, Any] = {}
    if config.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_model(arm, model, blocks, config.settings(), device.type, config.per_node, **options)
    return model, adamw(model.parameters(), config)


def adamw(parameters: Iterable[nn.Parameter], config: JobConfig) -> AdamW:
    """The job's optimizer; vectors get no weight decay."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def plan_cost(config: JobConfig, vocab_size: int) -> Cost:
    """FLOPs of a document, from the model's config."""
    fields = config_of(model_source(config.model)) | {"vocab_size": vocab_size}
    return cost_from_config(fields, checkpointing=config.activation_checkpointing)


def _recompute(block: nn.Module) -> None:
    """Runs the block's forward again in backward. Its name, hooks and parameter names stay as they are."""
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
