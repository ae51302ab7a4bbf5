"""How a multimodal job is started, and what every rank runs around its part of it.

Chose the launcher of `odc train` and the same order of checks: what cannot work is refused before ranks start. The
price is that headers of the corpus are read once more, here.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch.distributed as dist

from odc.experiments.group import rank_group
from odc.experiments.launch import launch
from odc.experiments.multimodal.config import MultimodalConfig
from odc.experiments.multimodal.examples import read_examples
from odc.experiments.multimodal.flops import phase_costs
from odc.experiments.multimodal.model import load_config
from odc.experiments.multimodal.rank import MultimodalRank
from odc.experiments.multimodal.results import MultimodalResult
from odc.experiments.preflight import writable_folder
from odc.experiments.progress import Progress


def run(config: MultimodalConfig) -> list[MultimodalResult]:
    """Checks the job, starts its ranks on this machine, and returns their results in rank order.

    Raises `ConfigError` or `DataError` before ranks start, `JobFailedError` when a rank fails.
    """
    check(config)
    return launch(run_rank, config, ranks=config.job.ranks)


def check(config: MultimodalConfig) -> None:
    """All checks that need the disk: the model, every line of the corpus, and folders that are written to."""
    model = load_config(config.job.model)
    phase_costs(model)
    read_examples(Path(config.job.data), model.geometry, max_tokens=config.job.max_tokens)
    for name in ("output", "spans"):
        folder = getattr(config.job, name)
        if folder is not None:
            writable_folder(Path(folder), name)


def run_rank(config: MultimodalConfig) -> MultimodalResult:
    """Runs the job as one rank, in a process that has the environment of `torchrun`. Every rank calls it.

    Makes the process group and takes it down again. Raises on the rank where something fails.
    """
    job = config.job
    with (
        rank_group(job.ranks, job.timeout_s),
        closing(Progress(job.steps, job.label or config.name, shown=dist.get_rank() == 0)) as progress,
    ):
        return MultimodalRank(config, progress).run()
