"""One optimizer step: plan, run the microbatches, agree on the loss, update.

Chose to let every rank make the same plan from the same lengths, so that all know who computes what (or, under a
dynamic arm, what lies in the queue) and how many label tokens the minibatch has, without a word between them. Ranks
meet for the loss once a step, after the window; that meeting also tells every rank how many microbatches each computed,
and of a loss that is not finite, before any of them has updated. It costs one all-gather of 16 bytes a rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from odc.arms import Arm
from odc.balance import Cost, queue_of
from odc.trace import OPTIMIZER, recorder
from odc.train.arms import run_minibatch, run_queue
from odc.train.config import JobConfig
from odc.train.dataset import Dataset
from odc.train.device import settle
from odc.train.finish import agree, update
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
        device: where the model is.
        computed: microbatches that this rank ran in its last step.
    """

    config: JobConfig
    arm: Arm
    model: Any
    optimizer: Optimizer
    dataset: Dataset
    cost: Cost
    device: torch.device
    computed: int = 0

    def run(self, step: int, samples: list[int], between: Callable[[], None] | None = None) -> StepRecord:
        """Optimizer step number `step` (from 0) on the documents `samples`; meets the other ranks.

        `between` is called between the first and the second microbatch of this rank, if it runs two. Raises
        `NonFiniteLossError` on every rank, before the update, when a loss or the gradient norm is NaN or infinite.
        """
        start = recorder().now()
        rank, world = dist.get_rank(), dist.get_world_size()
        documents = [self.dataset.documents[i] for i in samples]
        plan = self.arm.plan([len(d) for d in documents], world, self.config.max_tokens, self.cost, self.config.seed)
        loads = self.arm.loads(plan, rank)
        mine = [pack([documents[i] for i in microbatch]) for microbatch, _ in loads]
        if not self.arm.dynamic:
            mine += [padded_dummy() for _ in range(self.arm.counts(plan)[rank] - len(mine))]
        label_tokens = sum(document.label_tokens for document in documents)
        rate = self._set_rate(step)
        with recorder().window(step + 1):
            loss_sum = self._minibatch(
                step, mine, [cost for _, cost in loads], loss_scale(world, label_tokens), between
            )
        total, counts = agree(step, loss_sum, self.computed)
        loss = total / max(1, label_tokens)
        with recorder().span(OPTIMIZER):
            norm = update(step, self.model.parameters(), self.optimizer, self.config.clip)
            settle(self.device)
        return StepRecord(
            step=step + 1,
            loss=loss,
            norm=norm,
            lr=rate,
            samples=len(documents),
            tokens=sum(len(document) for document in documents),
            label_tokens=label_tokens,
            counts=counts,
            dummies=sum(counts) - len(queue_of(plan)),
            step_s=(recorder().now() - start) * NS,
            plan_bubble=self.arm.predicted_bubble(plan),
            bound_bubble=plan.bubble_bound,
        )

    def _minibatch(
        self,
        step: int,
        mine: list[Microbatch],
        costs: list[float],
        scale: float,
        between: Callable[[], None] | None,
    ) -> float:
        """Runs `mine`, or under a dynamic arm what this rank claims of everybody's; returns the summed loss."""
        losses: list[float] = []

        def backward(m: int, microbatch: Microbatch) -> None:
            if m == 1 and between is not None:
                between()
            with recorder().microbatch(m):
                began = time.thread_time()
                loss = self.model(**microbatch.to(self.device).model_inputs())
                (loss * scale).backward()
                losses.append(float(loss.detach()))  # on CUDA after backward: the stream is waited for
                self._slow_down(time.thread_time() - began)

        def claimed(m: int, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
            # What is drawn at random (dropout) belongs to the microbatch, not to the rank that happens to compute it.
            torch.manual_seed(int(np.random.SeedSequence([self.config.seed, step, number]).generate_state(1)[0]))
            backward(m, Microbatch.from_tensors(tensors))

        if self.arm.dynamic:
            run_queue(self.arm, self.model, [microbatch.tensors() for microbatch in mine], costs, claimed)
        else:
            run_minibatch(self.arm, self.model, len(mine), lambda m: backward(m, mine[m]))
        self.computed = len(losses)
        return math.fsum(losses)

    def _slow_down(self, computed_s: float) -> None:
        """Emulates a slower device: sleeps for the rest of what `computed_s` seconds of processor time take on it."""
        factor = self.config.slowed().get(dist.get_rank(), 1.0)
        if factor > 1:
            time.sleep((factor - 1) * computed_s)

    def _set_rate(self, step: int) -> float:
        config = self.config
        rate = learning_rate(step, steps=config.steps, peak=config.lr, warmup=config.warmup, floor=config.min_lr)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate
