"""Supervised fine-tuning as a workload: its checks, its arms and the figures that only it has."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Self, cast

import torch

from odc.arms import ARM_NAMES, ArmName
from odc.experiments.config import DEFAULT_ARMS, JobConfig
from odc.experiments.data.dataset import load_dataset
from odc.experiments.launch import start_server
from odc.experiments.preflight import check_arm, check_extras, preflight
from odc.experiments.progress import Progress
from odc.experiments.results import ArmRun, totals
from odc.experiments.text.step import TextTrainer
from odc.experiments.workload import Workload
from odc.trace import Stat


class TextWorkload(Workload[JobConfig]):
    """A job of `odc train` or `odc compare`."""

    schema = "odc-compare-1"
    arms = ARM_NAMES
    default_arms = DEFAULT_ARMS

    def __init__(self, config: JobConfig) -> None:
        super().__init__(config, config, config.label or "odc train", config.output)
        self.device = config.device
        self.keeps |= config.export is not None

    def check_arm(self) -> None:
        check_arm(self.config, self.config.arm)

    def check_extras(self) -> None:
        check_extras(self.config)

    def check(self) -> None:
        preflight(self.config)

    def prepare(self, title: str = "") -> None:
        """Also puts token ids into the cache, where ranks find them."""
        self.check()
        start_server()  # loads while the data is read
        progress = Progress(self.config.steps, title or self.title)
        try:
            dataset = load_dataset(self.config, progress)
            job, count = self.config, len(dataset.documents)
            epochs = job.steps * job.minibatch_size / count
            unseen = f", {len(dataset.valid)} for validation" if dataset.valid else ""
            progress.phase(
                f"{count} documents{unseen}, {sum(dataset.lengths):,} tokens; {job.steps} steps of "
                f"{job.minibatch_size} are {epochs:.2g} epochs; starting the ranks"
            )
        finally:
            progress.close()

    def trainer(self, progress: Progress, device: torch.device) -> TextTrainer:
        return TextTrainer(self.config, progress, device)

    def with_arm(self, arm: str, title: str = "", spans: str | None = None) -> Self:
        changes: dict[str, Any] = {"arm": cast(ArmName, arm), "label": title, "output": None, "spans": spans}
        return type(self)(self.config.with_(**changes))

    def to_dict(self) -> dict[str, Any]:
        return self.config.to_dict()

    def figures(self, runs: Sequence[ArmRun], skip: int, seconds: Sequence[float]) -> dict[str, Any]:
        steps = runs[0].results[0].steps[skip:]
        return {
            "samples_per_s": Stat.of(s.samples / t for s, t in zip(steps, seconds, strict=True)).to_dict(),
            "tokens_per_s": Stat.of(s.tokens / t for s, t in zip(steps, seconds, strict=True)).to_dict(),
            "total": totals(steps, sum(seconds)),
            "plan": {
                "bubble": fmean(step.plan_bubble for step in steps),
                "bound": fmean(step.bound_bubble for step in steps),
                "microbatches": [step.counts for step in steps],
                "dummies": sum(step.dummies for step in steps),
                "pieces": [step.pieces for step in steps],
            },
        }
