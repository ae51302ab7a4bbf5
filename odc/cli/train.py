"""`odc train`: one job of supervised fine-tuning."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from odc.cli.options import options_from
from odc.experiments.config import JobConfig


@options_from("odc.experiments.config:JobConfig")
def train(given: dict[str, Any]) -> None:
    """Fine-tune a causal language model on text, sharded over ranks.

    Starts its own ranks on this machine. Under torchrun it runs as one rank, and torchrun says how many there are.
    """
    world = world_of_torchrun()
    if world is not None:
        from odc.experiments.job import run_rank
        from odc.experiments.text.workload import TextWorkload

        run_under_torchrun(run_rank, TextWorkload(JobConfig(**(given | {"ranks": world}))))
        return
    config = JobConfig(**given)
    print(f"odc train: {config.arm}, {config.ranks} ranks, {config.steps} steps", file=sys.stderr, flush=True)
    from odc.experiments.job import run
    from odc.experiments.text.workload import TextWorkload

    print(run(TextWorkload(config))[0].summary())


def world_of_torchrun() -> int | None:
    """The number of ranks where this process is one of torchrun's; else None."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def run_under_torchrun(run_rank: Callable[[Any], Any], config: Any) -> None:
    """Runs this process's rank, records its error for torchrun, and prints a summary on rank 0."""
    from torch.distributed.elastic.multiprocessing.errors import record

    result = record(run_rank)(config)
    if os.environ["RANK"] == "0" and result is not None:
        print(result.summary())
