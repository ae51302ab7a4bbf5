"""One optimizer step: plan, run the microbatches, agree on the loss, update.

Chose to let every rank make the same plan from the same lengths, so that all know who computes what and how many label
tokens the minibatch has, without a word between them. Ranks meet for the loss once a step, after the window; that
meeting also tells every rank about a loss that is not finite, before any of them has updated. It costs one
all-gather of 8 bytes a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from odc.balance import Cost, Plan
from odc.errors import NonFiniteLossError
from odc.trace import COLLECTIVE, OPTIMIZER, WAIT, recorder
from odc.train.arms import Arm
from odc.train.config import JobConfig
from odc.train.dataset import Dataset
from odc.train.loss import loss_scale
from odc.train.packing import Microbatch, pack, padded_dummy
from odc.train.results import StepRecord
from odc.train.schedule import learning_rate

NS = 1e-9


@dataclass
class Step:
    """What all steps of a job share; `run` does one. On every rank, on its training thread.

    Args:
        config: the job's.
        arm: balancing and transport.
        model: sharded by the arm; called with labels it returns the summed loss.
        optimizer: over the model's parameters.
        dataset: what sample indices point to.
        cost: the planner's cost model.
    """

    config: JobConfig
    arm: Arm
    model: Any
    optimizer: Optimizer
    dataset: Dataset
    cost: Cost

    def run(self, step: int, samples: list[int], between: Callable[[], None] | None = None) -> StepRecord:
        """Optimizer step number `step` (from 0) on the documents `samples`; meets the other ranks.

        `between` is called after the first of several microbatches. Raises `NonFiniteLossError` on every rank, before
        the update, when a loss or the gradient norm is NaN or infinite.
        """
        start = recorder().now()
        rank, world = dist.get_rank(), dist.get_world_size()
        documents = [self.dataset.documents[i] for i in samples]
        plan = self.arm.plan([len(d) for d in documents], world, self.config.max_tokens, self.cost, self.config.seed)
        counts = self.arm.counts(plan)
        mine = [pack([documents[i] for i in microbatch]) for microbatch in plan.ranks[rank] if microbatch]
        mine += [padded_dummy() for _ in range(counts[rank] - len(mine))]
        label_tokens = sum(document.label_tokens for document in documents)
        rate = self._set_rate(step)
        with recorder().window(step + 1):
            loss_sum = self._minibatch(mine, loss_scale(world, label_tokens), between)
        loss = self._agree(step, loss_sum) / max(1, label_tokens)
        with recorder().span(OPTIMIZER):
            norm = self._update(step)
        return StepRecord(
            step=step + 1,
            loss=loss,
            norm=norm,
            lr=rate,
            samples=len(documents),
            tokens=sum(len(document) for document in documents),
            label_tokens=label_tokens,
            counts=counts,
            dummies=sum(counts) - _real_microbatches(plan),
            step_s=(recorder().now() - start) * NS,
            plan_bubble=self.arm.predicted_bubble(plan),
            bound_bubble=plan.bubble_bound,
        )

    def _minibatch(self, mine: list[Microbatch], scale: float, between: Callable[[], None] | None) -> float:
        losses: list[float] = []

        def backward(m: int) -> None:
            with recorder().microbatch(m):
                loss = self.model(**mine[m].model_inputs())
                (loss * scale).backward()
                losses.append(float(loss.detach()))
            if m == 0 and len(mine) > 1 and between is not None:
                between()

        self.arm.run(self.model, len(mine), backward)
        return math.fsum(losses)

    def _agree(self, step: int, loss_sum: float) -> float:
        """The loss summed over all ranks, in rank order, so that every rank gets the same bits."""
        sums = [torch.zeros((), dtype=torch.float64) for _ in range(dist.get_world_size())]
        with recorder().span(WAIT, peer=COLLECTIVE):
            dist.all_gather(sums, torch.tensor(loss_sum, dtype=torch.float64))
        values = [float(value) for value in sums]
        bad = [rank for rank, value in enumerate(values) if not math.isfinite(value)]
        if bad:
            raise NonFiniteLossError(
                f"step {step + 1}: the loss of rank {', '.join(map(str, bad))} is {values[bad[0]]}; nothing was "
                "updated. Lower the learning rate, or look at the data of this step"
            )
        return math.fsum(values)

    def _update(self, step: int) -> float:
        limit = self.config.clip if self.config.clip > 0 else math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not math.isfinite(value):
            raise NonFiniteLossError(f"step {step + 1}: the gradient norm is {value}; nothing was updated")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value

    def _set_rate(self, step: int) -> float:
        config = self.config
        rate = learning_rate(step, steps=config.steps, peak=config.lr, warmup=config.warmup, floor=config.min_lr)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate


def _real_microbatches(plan: Plan) -> int:
    return sum(1 for microbatches in plan.ranks for microbatch in microbatches if microbatch)
