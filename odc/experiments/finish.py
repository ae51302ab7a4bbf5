"""How a step ends: ranks agree on the loss, then update.

Chose one meeting for everything the ranks must agree on before any of them updates, the loss and whether it is finite:
an all-gather of 16 bytes a rank, outside the minibatch's own communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import Optimizer

from odc.errors import NonFiniteLossError
from odc.trace import COLLECTIVE, WAIT, recorder


def agree(step: int, loss_sum: float, computed: int) -> tuple[float, list[int]]:
    """The loss summed over all ranks, in rank order, so that every rank gets the same bits; and each one's `computed`.

    All ranks meet. Raises `NonFiniteLossError` on every rank when a rank's loss is NaN or infinite; `step` counts
    from 0.
    """
    mine = torch.tensor([loss_sum, computed], dtype=torch.float64)
    rows = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    with recorder().span(WAIT, peer=COLLECTIVE):
        dist.all_gather(rows, mine)
    values, counts = [float(row[0]) for row in rows], [int(row[1]) for row in rows]
    bad = [rank for rank, value in enumerate(values) if not math.isfinite(value)]
    if bad:
        raise NonFiniteLossError(
            f"step {step + 1}: the loss of rank {', '.join(map(str, bad))} is {values[bad[0]]}; nothing was "
            "updated. Lower the learning rate, or look at the data of this step"
        )
    return math.fsum(values), counts


def update(step: int, parameters: Iterable[Parameter], optimizer: Optimizer, clip: float) -> float:
    """Clips (0: only measures) and updates, and clears the gradients; returns the norm before clipping. All ranks meet.

    Raises `NonFiniteLossError` when the norm is NaN or infinite; nothing was updated then.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip if clip > 0 else math.inf)
    value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if not math.isfinite(value):
        raise NonFiniteLossError(f"step {step + 1}: the gradient norm is {value}; nothing was updated")
    optimizer.step()
    optimizer.zero_grad()
    return value
