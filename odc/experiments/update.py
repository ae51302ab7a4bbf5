"""The end of a step: the ranks agree on the loss, then update at the scheduled learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer

from odc.errors import NonFiniteLossError
from odc.experiments.config import JobConfig, Schedule
from odc.trace import COLLECTIVE, WAIT, recorder


def learning_rate(
    step: int, *, steps: int, peak: float, warmup: int, floor: float, schedule: Schedule = "cosine"
) -> float:
    """The rate of step `step` (from 0) of `steps`: a linear rise over `warmup` steps, then the peak ("constant"), or a
    fall from it to `floor * peak` in the last step.

    Step 0 of a warm-up already gets peak / warmup.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    after = steps - 1 - warmup
    if schedule == "constant" or after <= 0:
        return peak
    done = (step - warmup) / after
    left = 1 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (floor + (1 - floor) * left)


def set_rate(optimizer: Optimizer, config: JobConfig, step: int) -> float:
    """Sets and returns the learning rate of step `step`, counted from 0."""
    shape: dict[str, Any] = {"warmup": config.warmup, "floor": config.min_lr, "schedule": config.schedule}
    rate = learning_rate(step, steps=config.steps, peak=config.lr, **shape)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def adamw(parameters: Iterable[nn.Parameter], config: JobConfig) -> AdamW:
    """The job's optimizer; vectors get no weight decay."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )


def gather(mine: Sequence[float]) -> list[list[float]]:
    """Every rank's numbers, by rank, in fp64. All ranks meet."""
    with recorder().span(WAIT, peer=COLLECTIVE):
        return by_rank(torch.tensor(mine, dtype=torch.float64)).tolist()


def by_rank(mine: torch.Tensor) -> torch.Tensor:
    """Every rank's tensor, of one shape: [ranks, *shape]. All ranks meet."""
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return torch.stack(rows)


def agree(name: str, loss_sum: float, *others: float) -> tuple[float, list[list[float]]]:
    """The loss summed in rank order, the same bits on every rank, and each rank's `others`. All ranks meet.

    Raises `NonFiniteLossError` on every rank if a rank's loss is NaN or infinite; `name` names the step.
    """
    rows = gather([loss_sum, *others])
    values = [row[0] for row in rows]
    bad = [rank for rank, value in enumerate(values) if not math.isfinite(value)]
    if bad:
        raise NonFiniteLossError(
            f"{name}: the loss of rank {', '.join(map(str, bad))} is {values[bad[0]]}; nothing was "
            "updated. Lower the learning rate, or look at the data of this step"
        )
    return math.fsum(values), [row[1:] for row in rows]


def update(name: str, parameters: Iterable[nn.Parameter], optimizer: Optimizer, clip: float) -> float:
    """Clips to `clip` (0 only measures), updates and clears the gradients; returns the norm before clipping.

    All ranks meet. Raises `NonFiniteLossError` before the update if the norm is NaN or infinite.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip if clip > 0 else math.inf)
    value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if not math.isfinite(value):
        raise NonFiniteLossError(f"{name}: the gradient norm is {value}; nothing was updated")
    optimizer.step()
    optimizer.zero_grad()
    return value
