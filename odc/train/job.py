"""How a job is started, and what every rank runs around its part of it.

Chose one function that a rank runs whoever started it, `odc train` or `torchrun`, over two ways through the code. The
launching process reads the data first: what cannot work is refused before ranks start, and ranks find ids in the cache.
"""

from __future__ import annotations

import logging
from datetime import timedelta

import torch
import torch.distributed as dist

from odc.train.config import JobConfig, threads_per_rank
from odc.train.dataset import load_dataset
from odc.train.device import backend, take_device
from odc.train.launch import launch, start_server
from odc.train.preflight import preflight
from odc.train.progress import Progress
from odc.train.rank import RankJob
from odc.train.results import JobResult


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
    from odc.fsdp import shutdown

    torch.set_num_threads(threads_per_rank(config.ranks))
    dist.init_process_group(backend(config), timeout=timedelta(seconds=config.timeout_s))
    device = take_device(config)
    progress = Progress(config.steps, config.label, shown=dist.get_rank() == 0)
    try:
        result = RankJob(config, progress, device).run()
        dist.barrier()  # no rank takes the group down while another still writes
        return result
    finally:
        progress.close()
        shutdown()
        dist.destroy_process_group()
