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
from odc.balance import Cost, Plan, queue_of
from odc.errors import AbandonedMinibatchError
from odc.experiments.arms import run_minibatch, run_queue
from odc.experiments.config import JobConfig
from odc.experiments.data.dataset import Dataset
from odc.experiments.data.documents import Document
from odc.experiments.data.packing import Microbatch, pack, padded_dummy
from odc.experiments.device import out_of_memory, settle
from odc.experiments.finish import agree, update
from odc.experiments.results import SkippedStep, StepRecord
from odc.experiments.schedule import learning_rate
from odc.experiments.text.loss import loss_scale
from odc.trace import OPTIMIZER, recorder

NS = 1e-9


@dataclass(frozen=True)
class _Prepared:
    """A minibatch before it runs.

    Attributes:
        plan: of all ranks.
        mine: this rank's microbatches.
        costs: predicted, of each; dummies have none.
        scale: of the summed losses.
    """

    plan: Plan
    mine: list[Microbatch]
    costs: list[float]
    scale: float


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

    def run(self, step: int, samples: list[int], between: Callable[[], None] | None = None) -> StepRecord | SkippedStep:
        """Optimizer step number `step` (from 0) on the documents `samples`; meets the other ranks.

        `between` is called between the first and the second microbatch of this rank, if it runs two. Where a rank runs
        out of memory under an on-demand arm, all ranks run the minibatch once more, in smaller microbatches, and then
        skip it. Raises `NonFiniteLossError` on every rank, before the update, when a loss or the gradient norm is NaN
        or infinite.
        """
        start = recorder().now()
        documents = [self.dataset.documents[i] for i in samples]
        rate = self._set_rate(step)
        prepared = self._prepare(documents, self.config.max_tokens)
        with recorder().window(step + 1):
            attempt = self._attempt_twice(step, documents, prepared, between)
        if isinstance(attempt, AbandonedMinibatchError):
            return SkippedStep(step + 1, f"rank {attempt.culprit}: {attempt.reason}")
        plan, loss_sum, retried = attempt
        label_tokens = sum(document.label_tokens for document in documents)
        total, counts = agree(step, loss_sum, self.computed)
        with recorder().span(OPTIMIZER):
            norm = update(step, self.model.parameters(), self.optimizer, self.config.clip)
            settle(self.device)
        return StepRecord(
            step=step + 1,
            loss=total / max(1, label_tokens),
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
            retried=retried,
        )

    def _prepare(self, documents: list[Document], max_tokens: int) -> _Prepared:
        rank, world = dist.get_rank(), dist.get_world_size()
        plan = self.arm.plan([len(d) for d in documents], world, max_tokens, self.cost, self.config.seed)
        loads = self.arm.loads(plan, rank)
        mine = [pack([documents[i] for i in microbatch]) for microbatch, _ in loads]
        if not self.arm.dynamic:
            mine += [padded_dummy() for _ in range(self.arm.counts(plan)[rank] - len(mine))]
        scale = loss_scale(world, sum(document.label_tokens for document in documents))
        return _Prepared(plan, mine, [cost for _, cost in loads], scale)

    def _attempt_twice(
        self, step: int, documents: list[Document], first: _Prepared, between: Callable[[], None] | None
    ) -> tuple[Plan, float, str | None] | AbandonedMinibatchError:
        """(plan, this rank's summed loss, why it was retried), or the second error; the same outcome on every rank."""
        try:
            return first.plan, self._minibatch(step, first, between), None
        except AbandonedMinibatchError as error:
            reason = f"rank {error.culprit}: {error.reason}"
        smaller = self._prepare(documents, max(self.config.max_tokens // 2, *(len(d) for d in documents)))
        try:
            return smaller.plan, self._minibatch(step, smaller, between), reason
        except AbandonedMinibatchError as error:
            return error.with_traceback(None)  # frames would keep the activations of the failed microbatch

    def _minibatch(self, step: int, prepared: _Prepared, between: Callable[[], None] | None) -> float:
        """Runs this rank's microbatches, or under a dynamic arm what it claims of everybody's; returns its loss."""
        mine, scale = prepared.mine, prepared.scale
        losses: list[float] = []
        given_up = False

        def backward(m: int, microbatch: Microbatch) -> None:
            nonlocal given_up
            if given_up:
                return
            if m == 1 and between is not None:
                between()
            try:
                with recorder().microbatch(m):
                    began = time.thread_time()
                    loss = self.model(**microbatch.to(self.device).model_inputs())
                    (loss * scale).backward()
                    losses.append(float(loss.detach()))  # on CUDA after backward: the stream is waited for
                    self._slow_down(time.thread_time() - began)
            except (RuntimeError, MemoryError) as error:
                if not self.arm.on_demand or not out_of_memory(error):
                    raise
                given_up = True
                self.model.abandon_minibatch(f"out of memory in a microbatch of {microbatch.tokens} tokens")

        def claimed(m: int, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
            # What is drawn at random (dropout) belongs to the microbatch, not to the rank that happens to compute it.
            torch.manual_seed(int(np.random.SeedSequence([self.config.seed, step, number]).generate_state(1)[0]))
            backward(m, Microbatch.from_tensors(tensors))

        if self.arm.dynamic:
            run_queue(self.arm, self.model, [microbatch.tensors() for microbatch in mine], prepared.costs, claimed)
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
