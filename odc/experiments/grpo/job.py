"""A GRPO job: its ranks, the rollout process beside them, and the loop over both.

Chose one rollout process, fed by reading the ranks' published shards (`odc.handover`), over generating on every rank:
generation needs the whole model anyway, training needs no collective for it, and with `lag=1` the two overlap. Rank 0
talks to it and hands the samples to all ranks (one broadcast a step, outside of what is timed as training). Under the
fsdp2 arms, which publish nothing, the weights are gathered by a collective on every rank and sent.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import AdamW

from odc.arms import arm_named
from odc.balance import cost_from_config
from odc.blocks import blocks_of
from odc.errors import ConfigError, DataError
from odc.experiments.arms import shard_model
from odc.experiments.group import rank_group
from odc.experiments.grpo.config import GrpoConfig
from odc.experiments.grpo.objective import objective_named
from odc.experiments.grpo.results import GrpoResult, GrpoStep
from odc.experiments.grpo.rollout import Rollout
from odc.experiments.grpo.samples import Sample
from odc.experiments.grpo.tasks import Task, UpperHalf
from odc.experiments.grpo.update import Outcome, Update
from odc.experiments.launch import launch
from odc.experiments.preflight import model_source, unwritten_file, writable_folder
from odc.experiments.text.model import build_model, config_of
from odc.trace import Span, recorder, save_spans


def run(config: GrpoConfig, task: Task | None = None) -> list[GrpoResult]:
    """Start the ranks and the rollout process on this machine; returns the ranks' results in rank order.

    `task` must pickle; None is the toy task. Raises `ConfigError` before ranks start, `JobFailedError` when one fails.
    """
    fields = config_of(model_source(config.model))
    if config.spans is not None:
        writable_folder(Path(config.spans), "spans")
    _check_output(config)
    if not isinstance(fields.get("vocab_size"), int):
        raise ConfigError(f"model: {config.model} does not say its vocab_size")
    return launch(run_rank, config, task, ranks=config.ranks)


def run_rank(config: GrpoConfig, task: Task | None = None) -> GrpoResult:
    """The job as one rank, in a process with the environment of `torchrun`; every rank calls it."""
    _check_output(config)  # before the ranks meet, so before any has written
    with rank_group(config.ranks, config.timeout_s):
        return train(config, task)


def _check_output(config: GrpoConfig) -> None:
    if config.output is not None:
        unwritten_file(Path(config.output), "output")


def train(config: GrpoConfig, task: Task | None = None) -> GrpoResult:
    """The job inside a process group that is there already. Every rank calls it, on its training thread."""
    source = model_source(config.model)
    fields = config_of(source)
    chosen = task or UpperHalf(fields["vocab_size"], config.prompts, config.prompt_tokens, config.seed)
    recorder().set_rank(dist.get_rank())
    arm = arm_named(config.arm)
    model = build_model(source, dtype=torch.float32, seed=config.seed)
    shard_model(arm, model, blocks_of(model), config.settings())
    optimizer = AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, eps=1e-6, foreach=True)
    update = Update(config, arm, model, optimizer, objective_named(config), cost_from_config(fields))
    steps, spans = [], list[Span]()
    with contextlib.ExitStack() as ending:
        loop = _Loop(config, chosen, model, ending)
        recorder().clear()
        for step in range(config.steps):
            began = time.perf_counter()
            version, samples = loop.samples(step)
            waited = time.perf_counter() - began
            outcomes = _updates(config, update, samples)
            steps.append(_record(step, version, samples, outcomes, waited))
            if config.spans is not None:
                spans += recorder().spans()
            recorder().clear()
            _say(config, steps[-1])
    if config.spans is not None:
        save_spans(Path(config.spans) / f"rank-{dist.get_rank()}.jsonl", spans)
    return GrpoResult(dist.get_rank(), update.objective.name, steps)


class _Loop:
    """Weights out, samples in. On every rank; rank 0 has the rollout process, which `ending` closes."""

    def __init__(self, config: GrpoConfig, task: Task, model: Any, ending: contextlib.ExitStack) -> None:
        self._config, self._task, self._model = config, task, model
        self._rollout: Rollout | None = None
        # A group of its own, whose ranks may wait as long as a rollout may take.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout_s))
        ending.callback(dist.destroy_process_group, self._group)
        text = self._first_ticket()
        if dist.get_rank() == 0:
            self._rollout = ending.enter_context(Rollout(config, task.stop_ids, text))
        if config.lag:
            self._ask(0)

    def _first_ticket(self) -> str | None:
        if not self._config.on_demand:
            return None
        from odc.handover import ticket

        self._model.publish()
        return ticket(self._model) if dist.get_rank() == 0 else None

    def samples(self, step: int) -> tuple[int | None, list[Sample]]:
        """A step's samples, the same on every rank, and the version that drew them; sends the weights off before."""
        if not self._config.lag:
            self._ask(step)
        collected: list[Any] = [self._collect(step)] if self._rollout is not None else [None]
        dist.broadcast_object_list(collected, 0, group=self._group)
        if self._config.lag and step + 1 < self._config.steps:
            self._ask(step + 1)
        version, samples = collected[0]
        return version, samples

    def _ask(self, step: int) -> None:
        """Publish the weights, or gather them, and have them used; nobody waits for the rollout here."""
        config, prompts = self._config, self._task.prompts(step)
        if config.on_demand:
            from odc.handover import version

            self._model.publish()
            if self._rollout is not None:
                self._rollout.ask(step, prompts, at_least=version(self._model))
            return
        whole = {name: value.full_tensor() for name, value in self._model.state_dict().items()}
        if self._rollout is not None:
            self._rollout.ask(step, prompts, weights=whole)

    def _collect(self, step: int) -> tuple[int | None, list[Sample]]:
        assert self._rollout is not None
        version, responses = self._rollout.collect()
        prompts, group, samples = self._task.prompts(step), self._config.group, []
        for number, response in enumerate(responses):
            prompt = prompts[number // group]
            reward = float(self._task.reward(prompt, response.tokens))
            if reward != reward or reward in (float("inf"), -float("inf")):
                raise DataError(f"step {step + 1}: the reward of response {number} is {reward}")
            samples.append(
                Sample(number // group, list(prompt), response.tokens, response.log_probs, response.reference, reward)
            )
        return version, samples


def _updates(config: GrpoConfig, update: Update, samples: Sequence[Sample]) -> list[Outcome]:
    """The step's optimizer steps: advantages over all samples, prompts dealt to minibatches."""
    rewards = torch.tensor([sample.reward for sample in samples])
    advantages = update.objective.advantages(rewards, [sample.group for sample in samples]).tolist()
    outcomes = []
    for m in range(config.minibatches):
        chosen = [i for i, sample in enumerate(samples) if sample.group % config.minibatches == m]
        outcomes.append(update.run([samples[i] for i in chosen], [advantages[i] for i in chosen]))
    return outcomes


def _record(
    step: int, version: int | None, samples: Sequence[Sample], outcomes: Sequence[Outcome], waited: float
) -> GrpoStep:
    lengths = [len(sample.response) for sample in samples]
    return GrpoStep(
        step=step + 1,
        version=version,
        reward=fmean(sample.reward for sample in samples),
        response_tokens=fmean(lengths),
        longest=max(lengths),
        loss=fmean(outcome.loss for outcome in outcomes),
        kl=fmean(outcome.kl for outcome in outcomes),
        norm=fmean(outcome.norm for outcome in outcomes),
        counts=[sum(counts) for counts in zip(*(outcome.counts for outcome in outcomes), strict=True)],
        rollout_s=waited,
        train_s=sum(outcome.seconds for outcome in outcomes),
    )


def _say(config: GrpoConfig, step: GrpoStep) -> None:
    if dist.get_rank():
        return
    if config.output is not None:
        with Path(config.output).open("a") as log:
            log.write(json.dumps(asdict(step)) + "\n")
    if config.show:
        print(
            f"odc grpo: step {step.step} of {config.steps}: reward {step.reward:.3f}, response "
            f"{step.response_tokens:.1f} tokens, rollout {step.rollout_s:.2f} s, training {step.train_s:.2f} s",
            file=sys.stderr,
            flush=True,
        )
