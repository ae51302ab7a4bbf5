"""One optimizer step on samples that every rank knows: plan, run the microbatches, agree on what came out, update.

Chose to give every rank all samples of the step (token ids and numbers, a few hundred bytes each) over dealing them:
all make the same plan without a word, as in `odc.experiments.text.step`, and any rank can compute any sample.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from odc.arms import Arm
from odc.balance import Cost, Plan
from odc.errors import NonFiniteLossError
from odc.experiments.arms import run_minibatch
from odc.experiments.grpo.config import GrpoConfig
from odc.experiments.grpo.objective import Objective, kl_estimate
from odc.experiments.grpo.plans import verl_plan
from odc.experiments.grpo.samples import Batch, Sample, batch_of, token_log_probs
from odc.trace import COLLECTIVE, OPTIMIZER, WAIT, recorder


@dataclass(frozen=True)
class Outcome:
    """Of one optimizer step, the same on every rank: sums over response tokens, and the slowest rank's seconds."""

    loss: float
    kl: float
    norm: float
    counts: list[int]
    seconds: float


@dataclass
class Update:
    """What all optimizer steps of a job share. On every rank.

    Args:
        config: the job's.
        arm: balancing and transport.
        model: sharded by the arm.
        optimizer: over its parameters.
        objective: the formulae.
        cost: the planner's cost model.
        done: optimizer steps so far.
    """

    config: GrpoConfig
    arm: Arm
    model: Any
    optimizer: Optimizer
    objective: Objective
    cost: Cost
    done: int = 0

    def plan(self, samples: Sequence[Sample]) -> Plan:
        """Who computes what."""
        lengths, ranks, cap = [len(sample) for sample in samples], self.config.ranks, self.config.max_tokens
        if self.config.balance == "verl":
            return verl_plan(lengths, ranks, cap, self.cost)
        return self.arm.plan(lengths, ranks, cap, self.cost, self.config.seed)

    def run(self, samples: Sequence[Sample], advantages: Sequence[float]) -> Outcome:
        """One step on all of `samples`; meets the other ranks. Raises `NonFiniteLossError` on every rank, before it."""
        rank, plan = dist.get_rank(), self.plan(samples)
        mine = [
            batch_of([samples[i] for i in some], [advantages[i] for i in some])
            for some, _ in self.arm.loads(plan, rank)
        ]
        mine += [batch_of([], []) for _ in range(self.arm.counts(plan)[rank] - len(mine))]
        tokens = sum(len(sample.response) for sample in samples)
        self.done += 1
        begin = time.perf_counter()
        with recorder().window(self.done):
            sums = self._minibatch(mine, tokens)
        rows = self._agree([*sums, float(len(mine))])
        loss, kl = (math.fsum(row[i] for row in rows) for i in range(2))
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"update {self.done}: the loss is {loss}; nothing was updated")
        with recorder().span(OPTIMIZER):
            norm = self._step()
        seconds = max(row[0] for row in self._agree([time.perf_counter() - begin]))
        return Outcome(loss / dist.get_world_size(), kl / tokens, norm, [int(row[2]) for row in rows], seconds)

    def _minibatch(self, mine: list[Batch], tokens: int) -> tuple[float, float]:
        """(scaled loss, summed KL estimate) of this rank's microbatches."""
        losses, divergences = [0.0], [0.0]

        def backward(m: int) -> None:
            batch = mine[m]
            with recorder().microbatch(m):
                logits = self.model(**batch.inputs.model_inputs(labels=False)).logits
                if not len(batch.log_probs):
                    (0.0 * logits.sum()).backward()  # a dummy: the others are in a collective
                    return
                log_probs = token_log_probs(logits, batch.inputs.labels)
                loss = self.objective.loss(
                    log_probs, batch.log_probs, batch.reference, batch.advantages, tokens, dist.get_world_size()
                )
                loss.backward()
                losses.append(float(loss.detach()))
                if batch.reference is not None:
                    divergences.append(float(kl_estimate(log_probs.detach(), batch.reference).sum()))

        run_minibatch(self.arm, self.model, len(mine), backward)
        return math.fsum(losses), math.fsum(divergences)

    def _agree(self, mine: list[float]) -> list[list[float]]:
        """Every rank's numbers, by rank."""
        row = torch.tensor(mine, dtype=torch.float64)
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        with recorder().span(WAIT, peer=COLLECTIVE):
            dist.all_gather(rows, row)
        return [one.tolist() for one in rows]

    def _step(self) -> float:
        limit = self.config.clip if self.config.clip > 0 else math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not math.isfinite(value):
            raise NonFiniteLossError(f"update {self.done}: the gradient norm is {value}; nothing was updated")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value
