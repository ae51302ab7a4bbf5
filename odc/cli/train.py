"""`odc train` and `odc grpo`: one job of supervised fine-tuning, and one of reinforcement learning on the toy task."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

from typer import Option

from odc.arms import PLANS
from odc.cli.options import options_from
from odc.cli.torchrun import given_by_torchrun, under_torchrun
from odc.errors import ConfigError
from odc.experiments.config import GrpoConfig, JobConfig


@options_from(JobConfig)
def train(
    given: dict[str, Any],
    plan: Annotated[
        str | None,
        Option(help=f"How to balance a step: {', '.join(PLANS)}; short for an --arm.", show_default="lb-mini"),
    ] = None,
) -> None:
    """Fine-tune a causal language model on text, sharded over ranks.

    Starts its own ranks on this machine. Under torchrun it runs as one rank, and torchrun says how many there are.
    """
    if plan is not None:
        given["arm"] = _arm_of(plan, given)
    config = _configured("train", JobConfig, given)
    if os.environ.get("RANK", "0") == "0":
        _warn_of_what_is_lost(config)
    from odc.experiments.job import run, run_rank
    from odc.experiments.text.step import TextWorkload

    carry_out_job(run, run_rank, TextWorkload(config))


@options_from(GrpoConfig)
def grpo(given: dict[str, Any]) -> None:
    """Train a causal language model by GRPO; rollouts run in a process of their own and read the ranks' weights.

    Starts its own ranks on this machine. Under torchrun it runs as one rank. For a task of your own see docs/rl.md.
    """
    from odc.experiments.grpo import run, run_rank

    carry_out_job(run, run_rank, _configured("grpo", GrpoConfig, given | {"show": True}))


def _arm_of(plan: str, given: dict[str, Any]) -> str:
    if "arm" in given:
        raise ConfigError("plan is short for an arm: give --plan or --arm, not both")
    if plan not in PLANS:
        raise ConfigError(f"plan must be one of {', '.join(PLANS)}, not {plan!r}")
    return PLANS[plan]


def _warn_of_what_is_lost(config: JobConfig) -> None:
    """Training without an output folder cannot be resumed; without an export either, nothing of it is left."""
    if config.output is None:
        lost = "no checkpoint is kept" if config.export is not None else "NOTHING of this training is kept"
        more = "" if config.export is not None else ", or the model by --export FOLDER"
        message = f"odc train: {lost}; keep checkpoints and losses by --output FOLDER{more}"
        print(message, file=sys.stderr, flush=True)


def _configured(command: str, kind: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The configuration, with torchrun's number of ranks where it started this process; else prints what starts."""
    if under_torchrun():
        return kind(**(given | given_by_torchrun(given)))
    config = kind(**given)
    print(f"odc {command}: {config.arm}, {config.ranks} ranks, {config.steps} steps", file=sys.stderr, flush=True)
    return config


def carry_out_job(run: Callable[[Any], Any], run_rank: Callable[[Any], Any], job: Any) -> None:
    """Runs all ranks of a job, or under torchrun this one, whose error goes to torchrun; prints a summary once."""
    if not under_torchrun():
        print(run(job)[0].summary())
        return
    from torch.distributed.elastic.multiprocessing.errors import record

    result = record(run_rank)(job)
    if os.environ["RANK"] == "0" and result is not None:
        print(result.summary())
