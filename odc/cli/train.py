"""`odc train` and `odc grpo`: one job of supervised fine-tuning, and one of reinforcement learning on the toy task."""

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
    config = _configured("train", JobConfig, given)
    from odc.experiments.job import run, run_rank
    from odc.experiments.text.workload import TextWorkload

    carry_out_job(run, run_rank, TextWorkload(config))


@options_from("odc.experiments.grpo.config:GrpoConfig")
def grpo(given: dict[str, Any]) -> None:
    """Train a causal language model by GRPO; rollouts run in a process of their own and read the ranks' weights.

    Starts its own ranks on this machine. Under torchrun it runs as one rank. For a task of your own see docs/rl.md.
    """
    from odc.experiments.grpo import GrpoConfig, run, run_rank

    carry_out_job(run, run_rank, _configured("grpo", GrpoConfig, given | {"show": True}))


def under_torchrun() -> bool:
    """Whether torchrun started this process as one rank."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def _configured(command: str, kind: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The configuration, with torchrun's number of ranks where it started this process; else says what starts."""
    if under_torchrun():
        return kind(**(given | {"ranks": int(os.environ["WORLD_SIZE"])}))
    config = kind(**given)
    print(f"odc {command}: {config.arm}, {config.ranks} ranks, {config.steps} steps", file=sys.stderr, flush=True)
    return config


def carry_out_job(run: Callable[[Any], Any], run_rank: Callable[[Any], Any], job: Any) -> None:
    """Runs all ranks of a job, or under torchrun this one, whose error torchrun is told; prints a summary once."""
    if not under_torchrun():
        print(run(job)[0].summary())
        return
    from torch.distributed.elastic.multiprocessing.errors import record

    result = record(run_rank)(job)
    if os.environ["RANK"] == "0" and result is not None:
        print(result.summary())
