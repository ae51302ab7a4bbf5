"""`odc train` and `odc grpo`: one job of supervised fine-tuning, and one of reinforcement learning on the toy task."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any

from typer import Option

from odc.arms import PLANS
from odc.cli.launched import ALONE, Start, carry_out_job, given_by_launcher, how_to_start, join_launcher
from odc.cli.options import options_from
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

    Starts its own ranks on this machine. Under torchrun, srun and other launchers it runs as one rank, or starts those
    of its host, and the launcher says how many there are.
    """
    if plan is not None:
        given["arm"] = _arm_of(plan, given)
    start = how_to_start(sys.argv[1:])
    each = join_launcher(given)
    config = _configured("train", JobConfig, given, each)
    if os.environ.get("RANK", "0") == "0":
        _warn_of_what_is_lost(config)
    from odc.experiments.text.step import TextWorkload

    result = carry_out_job(TextWorkload(config), each)
    if result is not None:
        print("\n".join([result.summary(), *what_is_left(given, config, result.checkpoint, start)]))


@options_from(GrpoConfig)
def grpo(given: dict[str, Any]) -> None:
    """Train a causal language model by GRPO; rollouts run in a process of their own and read the ranks' weights.

    Starts its own ranks on this machine. Under torchrun, srun and other launchers it runs as one rank, or starts those
    of its host. For a task of your own see docs/rl.md.
    """
    each = join_launcher(given)
    config = _configured("grpo", GrpoConfig, given | {"show": True}, each)
    from odc.experiments.grpo import GrpoWorkload

    result = carry_out_job(GrpoWorkload(config), each)
    if result is not None:
        print(result.summary())


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


def _configured(command: str, kind: Callable[..., Any], given: dict[str, Any], each: int) -> Any:
    """The configuration, with the launcher's number of ranks where there is one; else prints what starts."""
    if each:
        return kind(**(given | given_by_launcher(given)))
    config = kind(**given)
    print(f"odc {command}: {config.arm}, {config.ranks} ranks, {config.steps} steps", file=sys.stderr, flush=True)
    return config


def what_is_left(given: dict[str, Any], config: JobConfig, checkpoint: str | None, start: Start = ALONE) -> list[str]:
    """Lines for the end of a job: what it has written, and the commands that go on from there; none if it kept nothing.

    `given` are the options of the command, `checkpoint` the last one that was saved.
    """
    written = [f"{config.output}/steps.jsonl"] if config.output else []
    written += [one for one in (checkpoint, config.export) if one]
    if not written:
        return []
    lines = ["wrote     " + ", ".join(map(shlex.quote, written))]
    if config.output:
        left_out = ("steps", "export", "merge", "resume")  # merge goes with an export only
        again = {name: value for name, value in given.items() if name not in left_out}
        resume = {"resume": config.output}
        lines.append("go on     " + _command(start.words, again | {"steps": 2 * config.steps} | resume))
        if not config.export:
            export = {"steps": config.steps} | resume | {"export": "FOLDER"}
            lines.append("export    " + _command(start.words, again | export))
        if start.note:
            lines.append(f"start     each of these {start.note}")
    if config.export:
        whole = not config.lora or config.merge
        model = f"pretrained={config.export}" if whole else f"pretrained={config.model},peft={config.export}"
        lines.append(f"evaluate  lm_eval --model hf --model_args {shlex.quote(model)} --tasks arc_easy")
    return lines


def _command(start: Sequence[str], options: dict[str, Any]) -> str:
    """`odc train`, after the words that start it, with fields of its configuration, as one types it."""
    flags = {one.name: one.metadata.get("flag", f"--{one.name.replace('_', '-')}") for one in fields(JobConfig)}
    words = [*start, "train"]
    for name, value in options.items():
        if value is not False:
            words += [flags[name]] if value is True else [flags[name], str(value)]
    return shlex.join(words)
