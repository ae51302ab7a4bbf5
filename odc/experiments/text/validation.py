"""The loss of a validation set: its mean over all labelled tokens, by whatever arm trains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from odc.arms import Arm
from odc.balance import Cost, lb_mini
from odc.eval import session
from odc.experiments.config import JobConfig
from odc.experiments.data.documents import Document
from odc.experiments.data.packing import pack, padded_dummy
from odc.experiments.update import gather
from odc.fsdp import reshard_all

_AT_ONCE = 256  # documents that one plan spreads over the ranks


def validation_loss(
    model: nn.Module, arm: Arm, documents: Sequence[Document], cost: Cost, config: JobConfig, device: torch.device
) -> float:
    """The mean loss per labelled token of `documents`, the same bits on every rank; leaves the model in train mode.

    Every rank calls it between two steps, with the same documents; it meets the other ranks. On demand each rank runs
    as many microbatches as its share has; collectives need as many on every rank, so the others run dummies.
    """
    microbatches = [pack([documents[i] for i in indices]) for indices in _share(documents, cost, config)]
    losses = [0.0]
    model.eval()
    with _readable(model, arm, config), torch.no_grad():
        for microbatch in microbatches:
            losses.append(float(model(**microbatch.to(device).model_inputs())))
        if not arm.on_demand:
            counts = [int(count) for (count,) in gather([len(microbatches)])]
            for _ in range(max(counts) - len(microbatches)):
                model(**padded_dummy().to(device).model_inputs())
    model.train()
    total = math.fsum(loss for (loss,) in gather([math.fsum(losses)]))
    return total / sum(document.label_tokens for document in documents)


def _share(documents: Sequence[Document], cost: Cost, config: JobConfig) -> list[list[int]]:
    """Which documents this rank's microbatches hold."""
    mine: list[list[int]] = []
    for start in range(0, len(documents), _AT_ONCE):
        lengths = [len(document) for document in documents[start : start + _AT_ONCE]]
        plan = lb_mini(lengths, dist.get_world_size(), config.max_tokens, cost=cost, seed=config.seed)
        mine += [[start + i for i in indices] for indices in plan.ranks[dist.get_rank()] if indices]
    return mine


@contextmanager
def _readable(model: nn.Module, arm: Arm, config: JobConfig) -> Iterator[None]:
    """Inside, forwards may run; at its end parameters are sharded again, as a checkpoint needs them."""
    with session(modules=[model], timeout_s=config.timeout_s) if arm.on_demand else nullcontext():
        yield
    reshard_all(model)
