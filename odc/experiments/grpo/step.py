"""A GRPO job: its checks and figures, and one rank of it, whose step is a rollout and optimizer steps on its samples.

Every rank knows all samples of a step, so all make the same plan without communication.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self, cast, get_args

import torch
import torch.distributed as dist
from torch.optim import AdamW

from odc.arms import arm_named
from odc.balance import Plan, cost_of
from odc.blocks import blocks_of
from odc.errors import ConfigError
from odc.experiments import job
from odc.experiments.arms import run_minibatch, shard_model
from odc.experiments.config import GrpoArm, GrpoConfig
from odc.experiments.grpo.objective import grpo_advantages, grpo_loss, kl_estimate, verl_plan
from odc.experiments.grpo.rollout import SampleFeed
from odc.experiments.grpo.samples import (
    ResponsePart,
    Sample,
    SampleBatch,
    Task,
    UpperHalf,
    batch_of,
    response_pieces,
    token_log_probs,
)
from odc.experiments.grpo.vllm_generator import check_vllm
from odc.experiments.preflight import check_output, model_source, unwritten_file, writable_folder
from odc.experiments.progress import Progress
from odc.experiments.results import ArmRun, JobResult, StepRecord, totals
from odc.experiments.text.model import build_model, causal_config, config_of
from odc.experiments.text.packing_check import check_documents_once
from odc.experiments.text.pieces import check_splittable, splitter_of
from odc.experiments.update import agree, gather, update
from odc.experiments.workload import Trainer, Workload
from odc.split import Splitter, ranks_of_host
from odc.trace import OPTIMIZER, Stat, recorder


@dataclass(frozen=True)
class GrpoStep(StepRecord):
    """One rollout and its updates; samples are responses, label tokens their tokens.

    `loss` (the objective per response token), `kl` and `norm` are means over the step's minibatches, `reward` and
    `response_tokens` over samples. `version` is that of the weights that generated; None where they were sent. `counts`
    are microbatches by rank, dummies and pieces included. `rollout_s` is how long rank 0 waited, `train_s` the slowest
    rank's updates.
    """

    version: int | None
    reward: float
    response_tokens: float
    longest: int
    kl: float
    counts: list[int]
    rollout_s: float
    train_s: float


@dataclass(frozen=True)
class GrpoResult(JobResult[GrpoStep]):
    """One rank's result; `steps` are the same on all but for seconds."""

    def summary(self) -> str:
        if not self.steps:
            return super().summary()
        first, last = self.steps[0], self.steps[-1]
        return (
            f"step {last.step}: reward {first.reward:.3f} -> {last.reward:.3f}, response {last.response_tokens:.1f} "
            f"tokens, loss {last.loss:.4f}, kl {last.kl:.4f}"
        )


@dataclass(frozen=True)
class UpdateOutcome:
    """Of one optimizer step, the same on every rank: means over response tokens, and the slowest rank's seconds."""

    loss: float
    kl: float
    norm: float
    counts: list[int]
    seconds: float


class GrpoTrainer(Trainer):
    """One rank of a GRPO job; without a task it learns the toy task."""

    feed: SampleFeed | None = None
    splitter: Splitter | None = None  # only under an arm that splits samples

    def __init__(self, config: GrpoConfig, task: Task | None) -> None:
        self.config, self.arm = config, arm_named(config.arm)
        model = causal_config(model_source(config.model))
        self.cost = cost_of(model.to_dict(), warn=self._show)
        self.task = task or UpperHalf(model.vocab_size, config.prompts, config.prompt_tokens, config.seed)
        self.done = 0  # optimizer steps
        self._before: dict[str, Any] = {"samples": None, "version": None}  # when this rank last had no feed

    def check(self) -> None:
        check_documents_once(causal_config(model_source(self.config.model)), self.config.longest)

    def build(self) -> None:
        config, source = self.config, model_source(self.config.model)
        self.model = build_model(source, dtype=torch.float32, seed=config.seed)
        shard_model(self.arm, self.model, blocks_of(self.model), config.settings())
        if self.arm.splits:
            self.splitter = splitter_of(
                self.model, config.longest, config.max_tokens, ranks_of_host(), config.timeout_s
            )
        self.optimizer = AdamW(
            self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay, eps=1e-6, foreach=True
        )

    def state(self) -> dict[str, Any]:
        if self.feed is None:
            return self._before
        return {"samples": self.feed.hold(self.done // self.config.minibatches), "version": self.feed.newest}

    def restore(self, state: dict[str, Any]) -> None:
        self._before = state
        self.close()

    def start(self, first: int) -> None:
        if self.splitter is not None:
            self.splitter.prepare()

    def finish(self) -> None:
        if self.splitter is not None:
            self.splitter.close()

    def close(self) -> None:
        if self.feed is not None:
            self.feed.close()
            self.feed = None

    def result(self, measured: JobResult[Any]) -> GrpoResult:
        return GrpoResult(**vars(measured))

    def step(self, number: int, between: Callable[[], None] | None = None) -> GrpoStep:
        if self.feed is None:  # the ranks meet for it, so again after a recovery
            held, newest = self._before["samples"], self._before.get("version")
            self.feed = SampleFeed(self.config, self.task, self.model, held, newest)
        self.done = number * self.config.minibatches
        began = time.perf_counter()
        version, samples = self.feed.samples(number)
        waited = time.perf_counter() - began
        outcomes = self._updates(samples, between)
        lengths = [len(sample.response) for sample in samples]
        record = GrpoStep(
            step=number + 1,
            loss=fmean(outcome.loss for outcome in outcomes),
            norm=fmean(outcome.norm for outcome in outcomes),
            samples=len(samples),
            tokens=sum(len(sample) for sample in samples),
            label_tokens=sum(lengths),
            step_s=time.perf_counter() - began,
            version=version,
            reward=fmean(sample.reward for sample in samples),
            response_tokens=fmean(lengths),
            longest=max(lengths),
            kl=fmean(outcome.kl for outcome in outcomes),
            counts=[sum(counts) for counts in zip(*(outcome.counts for outcome in outcomes), strict=True)],
            rollout_s=waited,
            train_s=sum(outcome.seconds for outcome in outcomes),
        )
        self._show(
            f"step {record.step} of {self.config.steps}: reward {record.reward:.3f}, response "
            f"{record.response_tokens:.1f} tokens, rollout {waited:.2f} s, training {record.train_s:.2f} s"
        )
        return record

    def _show(self, text: str) -> None:
        if self.config.show and dist.get_rank() == 0:
            print(f"odc grpo: {text}", file=sys.stderr, flush=True)

    def _updates(self, samples: Sequence[Sample], between: Callable[[], None] | None) -> list[UpdateOutcome]:
        rewards = torch.tensor([sample.reward for sample in samples])
        advantages = grpo_advantages(rewards, [sample.group for sample in samples]).tolist()
        outcomes = []
        for m in range(self.config.minibatches):  # prompts are dealt to them
            chosen = [i for i, sample in enumerate(samples) if sample.group % self.config.minibatches == m]
            outcomes.append(self.update([samples[i] for i in chosen], [advantages[i] for i in chosen], between))
        return outcomes

    def plan(self, samples: Sequence[Sample]) -> Plan:
        lengths, ranks, cap = [len(sample) for sample in samples], self.config.ranks, self.config.max_tokens
        if self.config.balance == "verl":
            return verl_plan(lengths, ranks, cap, self.cost)
        limits = {} if self.splitter is None else {"node": self.splitter.node, "floor": self.config.least_piece}
        return self.arm.plan(lengths, ranks, cap, self.cost, self.config.seed, **limits)

    def update(
        self, samples: Sequence[Sample], advantages: Sequence[float], between: Callable[[], None] | None = None
    ) -> UpdateOutcome:
        """One optimizer step on all of `samples`; meets the other ranks. Raises what `Trainer.step` does."""
        rank, plan = dist.get_rank(), self.plan(samples)
        mine = [
            batch_of([samples[i] for i in some], [advantages[i] for i in some])
            for some, _ in self.arm.loads(plan, rank)
        ]
        mine += [batch_of([], []) for _ in range(self.arm.counts(plan)[rank] - len(mine))]
        tokens = sum(len(sample.response) for sample in samples)
        self.done += 1
        name, begin = f"update {self.done}", time.perf_counter()
        with recorder().window(self.done):
            pieces: Iterable[ResponsePart] = ()
            if self.splitter is not None:
                pieces = response_pieces(self.splitter, plan, samples, advantages)
            losses, divergence = self._minibatch(mine, pieces, tokens, between)
        loss, rows = agree(name, math.fsum(losses), divergence, len(losses))
        with recorder().span(OPTIMIZER):
            norm = update(name, self.model.parameters(), self.optimizer, self.config.clip)
        seconds = max(row[0] for row in gather([time.perf_counter() - begin]))
        kl, counts = math.fsum(row[0] for row in rows) / tokens, [int(row[1]) for row in rows]
        return UpdateOutcome(loss / dist.get_world_size(), kl, norm, counts, seconds)

    def _minibatch(
        self,
        mine: list[SampleBatch],
        pieces: Iterable[ResponsePart],
        tokens: int,
        between: Callable[[], None] | None,
    ) -> tuple[list[float], float]:
        """Scaled loss of each piece and microbatch of this rank, and their summed KL estimate."""
        losses: list[float] = []
        divergences: list[float] = []

        def run(part: ResponsePart) -> None:
            batch = part.batch
            if len(losses) == 1 and between is not None:
                between()
            with recorder().microbatch(len(losses), part.unit):
                logits = self.model(**part.inputs).logits
                if not len(batch.log_probs):
                    # A dummy, as the others are in a collective; or a piece without labels, as others await its layers.
                    (0.0 * logits.sum()).backward()
                    losses.append(0.0)
                    return
                log_probs = token_log_probs(logits, part.labels)
                given = (batch.log_probs, batch.reference, batch.advantages, tokens, dist.get_world_size())
                loss = grpo_loss(self.config, log_probs, *given)
                loss.backward()
                losses.append(float(loss.detach()))
                if batch.reference is not None:
                    divergences.append(float(kl_estimate(log_probs.detach(), batch.reference).sum()))

        def split() -> None:
            for part in pieces:
                run(part)

        def backward(m: int) -> None:
            batch = mine[m]
            run(ResponsePart(batch.inputs.model_inputs(labels=False), batch.inputs.labels, batch))

        run_minibatch(self.arm, self.model, len(mine), backward, split)
        return losses, math.fsum(divergences)


_VERL = "/verl"  # after an arm's name: with verl's equal counts instead of the arm's own planner


class GrpoWorkload(Workload[GrpoConfig]):
    """A job of `odc grpo`. `task` must pickle; None is the toy task."""

    schema = "odc-grpo-1"
    default_arms = tuple(arm for arm in get_args(GrpoArm) if not arm_named(arm).splits)
    arms = (*get_args(GrpoArm), *(f"{arm}{_VERL}" for arm in default_arms))
    shown = False  # the trainer prints a line a step

    def __init__(self, config: GrpoConfig, task: Task | None = None) -> None:
        super().__init__(config, config, "odc grpo", config.folder)
        self.task, self.windows, self.restarts = task, config.minibatches, config.recover
        self.log = Path(config.output) if config.output is not None else None

    def check(self) -> None:
        fields = config_of(model_source(self.config.model))
        if self.config.spans is not None:
            writable_folder(Path(self.config.spans), "spans")
        check_output(self.config.folder, self.config.resume, "folder")
        if self.log is not None and self.config.resume is None:
            unwritten_file(self.log, "output")
        if arm_named(self.config.arm).splits:
            check_splittable(model_source(self.config.model))
        if self.config.rollout == "vllm":
            check_vllm(model_source(self.config.model))
        if not isinstance(fields.get("vocab_size"), int):
            raise ConfigError(f"model: {self.config.model} does not say its vocab_size")

    def trainer(self, progress: Progress, device: torch.device) -> GrpoTrainer:
        return GrpoTrainer(self.config, self.task)

    def with_arm(self, arm: str, title: str = "", spans: str | None = None) -> Self:
        changes: dict[str, Any] = {"arm": cast(GrpoArm, arm.removesuffix(_VERL)), "spans": spans, "show": False}
        balance = "verl" if arm.endswith(_VERL) else "arm"
        return type(self)(self.config.with_(**changes, balance=balance, output=None, folder=None), self.task)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self.config)

    def figures(self, runs: Sequence[ArmRun], skip: int, seconds: Sequence[float]) -> dict[str, Any]:
        by_step = list(zip(*(run.results[0].steps[skip:] for run in runs), strict=True))
        train_s = [median(step.train_s for step in repeats) for repeats in by_step]
        steps = [repeats[0] for repeats in by_step]
        return {
            "total": totals(steps, sum(train_s)),
            "train_s": Stat.of(train_s).to_dict(),
            "rollout_s": Stat.of(median(step.rollout_s for step in repeats) for repeats in by_step).to_dict(),
            "reward": {"first": steps[0].reward, "final": steps[-1].reward},
            "response_tokens": fmean(step.response_tokens for step in steps),
            "microbatches": [step.counts for step in steps],
        }


def run(config: GrpoConfig, task: Task | None = None) -> list[GrpoResult]:
    """Starts the ranks and the rollout process on this machine; returns the ranks' results in rank order.

    `task` must pickle; None is the toy task. Raises `ConfigError` before ranks start, `JobFailedError` when one fails.
    """
    return job.run(GrpoWorkload(config, task))


def run_rank(config: GrpoConfig, task: Task | None = None) -> GrpoResult:
    """The job as one rank, in a process with the environment of `torchrun`; every rank calls it."""
    result: GrpoResult = job.run_rank(GrpoWorkload(config, task))
    return result
