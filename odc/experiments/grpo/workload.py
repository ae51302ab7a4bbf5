"""GRPO as a workload: its checks, its arms and the figures that only it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self, cast, get_args

import torch

from odc.arms import arm_named
from odc.errors import ConfigError
from odc.experiments import job
from odc.experiments.config import GrpoArm, GrpoConfig
from odc.experiments.grpo.samples import Task
from odc.experiments.grpo.step import GrpoResult, GrpoTrainer
from odc.experiments.preflight import check_output, model_source, unwritten_file, writable_folder
from odc.experiments.progress import Progress
from odc.experiments.results import ArmRun, totals
from odc.experiments.text.model import config_of
from odc.experiments.text.pieces import check_splittable
from odc.experiments.workload import Workload
from odc.trace import Stat

_VERL = "/verl"  # after an arm's name: with verl's equal counts instead of the arm's own planner


def _like_verl(arm: str) -> str:
    return f"{arm}{_VERL}"


class GrpoWorkload(Workload[GrpoConfig]):
    """A job of `odc grpo`. `task` must pickle; None is the toy task."""

    schema = "odc-grpo-1"
    default_arms = tuple(arm for arm in get_args(GrpoArm) if not arm_named(arm).splits)
    arms = (*get_args(GrpoArm), *map(_like_verl, default_arms))
    shown = False  # the trainer prints a line a step

    def __init__(self, config: GrpoConfig, task: Task | None = None) -> None:
        super().__init__(config, config, "odc grpo", config.folder)
        self.task, self.windows = task, config.minibatches
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
