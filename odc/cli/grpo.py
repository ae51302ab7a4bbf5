"""`odc grpo`: reinforcement learning on the toy task, and what it costs under each arm."""

from __future__ import annotations

import sys
from typing import Any

from odc.cli.options import options_from
from odc.cli.train import run_under_torchrun, world_of_torchrun


@options_from("odc.experiments.grpo.config:GrpoConfig")
def grpo(given: dict[str, Any]) -> None:
    """Train a causal language model by GRPO; rollouts run in a process of their own and read the ranks' weights.

    Starts its own ranks on this machine. Under torchrun it runs as one rank. For a task of your own see docs/rl.md.
    """
    from odc.experiments.grpo import GrpoConfig, run, run_rank

    world = world_of_torchrun()
    if world is not None:
        run_under_torchrun(run_rank, GrpoConfig(**(given | {"ranks": world, "show": True})))
        return
    config = GrpoConfig(**(given | {"show": True}))
    print(f"odc grpo: {config.arm}, {config.ranks} ranks, {config.steps} steps", file=sys.stderr, flush=True)
    print(run(config)[0].summary())
