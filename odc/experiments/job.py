"""How a job is started, and what every rank runs around its part of it.

Chose one function that a rank runs whoever started it, `odc train` or `torchrun`, over two ways through the code. The
launching process reads the data first: what cannot work is refused before ranks start, and ranks find ids in the cache.
"""

from __future__ import annotations

import logging
from contextlib import closing

import torch.distributed as dist

from odc.experiments.config import JobConfig
from odc.experiments.data.dataset import load_dataset
from odc.experiments.device import backend, take_device
from odc.experiments.group import rank_group
from odc.experiments.launch import launch, start_server
from odc.experiments.preflight import preflight
from odc.experiments.progress import Progress
from odc.experiments.results import JobResult
from odc.experiments.text.rank import RankJob


def run(config: JobConfig) -> list[JobResult]:
    """Checks the job, starts its ranks on this machine, and returns their results in rank order.

    Raises `ConfigError` or `DataError` before ranks start, `JobFailedError` when a rank fails.
    """
    prepare(config)
    return launch_ranks(config)


def prepare(config: JobConfig) -> None:
    """All checks that need the disk, and the data into the cache."""
    preflight(config)
    start_server()  # loads while the data is read
    progress = Progress(config.steps, config.label)
    try:
        dataset = load_dataset(config, progress)
        progress.phase(f"{len(dataset.documents)} documents, {sum(dataset.lengths):,} tokens; starting the ranks")
    finally:
        progress.close()


def launch_ranks(config: JobConfig) -> list[JobResult]:
    """`run` without `prepare`."""
    return launch(_launched_rank, config, ranks=config.ranks)


def _launched_rank(config: JobConfig) -> JobResult:
    logging.getLogger("odc").setLevel(logging.ERROR)  # the launching process has said the rest already
    return run_rank(config)


def run_rank(config: JobConfig) -> JobResult:
    """Runs the job as one rank, in a process that has the environment of `torchrun`. Every rank calls it.

    Makes the process group and takes it down again. Raises on the rank where something fails; the others learn of it
    from whoever started them, or from odc.
    """
    with (
        rank_group(config.ranks, config.timeout_s, backend(config)),
        closing(Progress(config.steps, config.label, shown=dist.get_rank() == 0)) as progress,
    ):
        return RankJob(config, progress, take_device(config)).run()
