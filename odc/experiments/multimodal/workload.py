"""Multimodal training as a workload: its checks and its arms, each a transport and a balance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch

from odc.experiments.multimodal.config import TRANSPORTS, MultimodalConfig
from odc.experiments.multimodal.examples import read_examples
from odc.experiments.multimodal.figures import figures, phase_times
from odc.experiments.multimodal.model import load_config
from odc.experiments.multimodal.plan import BALANCES, Balance, phase_costs
from odc.experiments.multimodal.step import PASSES, MultimodalTrainer
from odc.experiments.preflight import check_output, writable_folder
from odc.experiments.progress import Progress
from odc.experiments.results import ArmRun
from odc.experiments.workload import Workload
from odc.trace import Breakdown, Span

#: Compute in the picture: each pass of a step by its phase.
COLOURS = {"image": "#8fbf7f", "audio": "#c9a0dc", "llm": "#a9c6e3"}
_ARMS = tuple(f"{transport}/{balance}" for transport in TRANSPORTS for balance in BALANCES)


class MultimodalWorkload(Workload[MultimodalConfig]):
    """A job of `odc train-mm`."""

    schema = "odc-train-mm-1"
    arms = _ARMS
    default_arms = _ARMS
    drawn_windows = 1

    def __init__(self, config: MultimodalConfig) -> None:
        super().__init__(config, config.job, config.job.label or config.name, config.job.output)

    def check(self) -> None:
        job = self.config.job
        phase_costs(load_config(job.model))
        check_output(job.output, job.resume)
        if job.spans is not None:
            writable_folder(Path(job.spans), "spans")

    def prepare(self, title: str = "") -> None:
        """Also reads every line of the corpus, and the headers of its files."""
        self.check()
        job = self.config.job
        geometry = load_config(job.model).geometry
        read_examples(Path(job.data), geometry, max_tokens=job.max_tokens)

    def trainer(self, progress: Progress, device: torch.device) -> MultimodalTrainer:
        return MultimodalTrainer(self.config)

    def with_arm(self, arm: str, title: str = "", spans: str | None = None) -> Self:
        transport, _, balance = arm.partition("/")
        changes = {"arm": transport, "label": title, "output": None, "spans": spans}
        return type(self)(self.config.with_(cast(Balance, balance), **changes))

    def to_dict(self) -> dict[str, Any]:
        return self.config.job.to_dict()

    def dissect(self, spans_by_rank: Mapping[int, Sequence[Span]], measured: Breakdown) -> Any:
        return [phase_times(spans_by_rank, step.epoch) for step in measured.steps]

    def figures(self, runs: Sequence[ArmRun], skip: int, seconds: Sequence[float]) -> dict[str, Any]:
        return figures(runs, skip, seconds)

    def facts(self) -> dict[str, Any]:
        return {"per_node": self.config.per_node}

    def passes(self) -> list[tuple[str, str]]:
        return [(phase, COLOURS[phase]) for phase in PASSES]
