"""`odc grpo`: reinforcement learning on the toy task, and what it costs under each arm."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from typer import Option

from odc.cli import options

_ROLLOUT, _LOSS = "Rollout", "Objective"


def grpo(
    model: Annotated[
        str | None, Option(help="Hugging Face config (JSON) or model folder, or a shipped name. [default: qwen2-toy]")
    ] = None,
    arm: Annotated[str | None, Option(help="odc, odc-equal, fsdp2 or fsdp2-resident. [default: odc]")] = None,
    balance: Annotated[
        str | None, Option(help="arm (the arm's own planner) or verl (equal counts). [default: arm]")
    ] = None,
    output: Annotated[str | None, Option(help="New file that gets one line of JSON a step.")] = None,
    ranks: options.Ranks = None,
    steps: Annotated[int | None, Option(help="Rollouts, each followed by its updates. [default: 20]")] = None,
    max_tokens: Annotated[int | None, Option(help="Most tokens of one microbatch. [default: 256]")] = None,
    prompts: Annotated[int | None, Option(help="Of a step. [default: 8]", rich_help_panel=_ROLLOUT)] = None,
    group: Annotated[int | None, Option(help="Responses to each. [default: 4]", rich_help_panel=_ROLLOUT)] = None,
    prompt_tokens: Annotated[int | None, Option(help="Of a prompt. [default: 6]", rich_help_panel=_ROLLOUT)] = None,
    response_tokens: Annotated[
        int | None, Option(help="Most of a response. [default: 32]", rich_help_panel=_ROLLOUT)
    ] = None,
    lengths: Annotated[
        str | None,
        Option(help="model, or drawn: cut at skewed lengths, for measurements. [default: model]",
               rich_help_panel=_ROLLOUT),
    ] = None,
    lag: Annotated[
        int | None, Option(help="1: generate one step ahead, while training. [default: 0]", rich_help_panel=_ROLLOUT)
    ] = None,
    second_buffer: Annotated[
        bool | None,
        Option("--second-buffer", help="Keep two published versions for the rollout.", rich_help_panel=_ROLLOUT),
    ] = None,
    minibatches: Annotated[
        int | None, Option(help="Optimizer steps a rollout. [default: 1]", rich_help_panel=_LOSS)
    ] = None,
    kl: Annotated[
        float | None, Option(help="Weight of the KL to the initial model. [default: 0]", rich_help_panel=_LOSS)
    ] = None,
    objective: Annotated[
        str | None, Option(help="auto, verl or odc: whose functions. [default: auto]", rich_help_panel=_LOSS)
    ] = None,
    lr: Annotated[float | None, Option(help="Learning rate. [default: 5e-3]", rich_help_panel=_LOSS)] = None,
    clip: options.Clip = None,
    seed: options.Seed = None,
    reproducible: options.Reproducible = None,
    timeout_s: options.Timeout = None,
) -> None:  # fmt: skip
    """Train a causal language model by GRPO; rollouts run in a process of their own and read the ranks' weights.

    Starts its own ranks on this machine. Under torchrun it runs as one rank. For a task of your own see docs/rl.md.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    from odc.experiments.grpo import GrpoConfig, run, run_rank

    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is not None and world is not None:
        from torch.distributed.elastic.multiprocessing.errors import record

        result = record(run_rank)(GrpoConfig(**(given | {"ranks": int(world), "show": True})))
        if rank == "0" and result is not None:
            print(result.summary())
        return
    config = GrpoConfig(**(given | {"show": True}))
    print(f"odc grpo: {config.arm}, {config.ranks} ranks, {config.steps} steps", file=sys.stderr, flush=True)
    print(run(config)[0].summary())
