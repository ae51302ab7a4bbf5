"""`odc compare-grpo`: arms of a GRPO job, one after the other, from the same prompts and weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from odc.cli.compare import Figures, Output, Repeats, Skip, carry_out, progress
from odc.cli.options import options_from
from odc.cli.torchrun import refuse_torchrun

_ARMS = "With commas: fsdp2, fsdp2-resident, odc-equal, odc; ARM/verl takes verl's equal counts."


@options_from(
    "odc.experiments.grpo.config:GrpoConfig", without=("arm", "balance", "output", "folder", "save_every", "resume")
)
def compare_grpo(
    given: dict[str, Any],
    arms: Annotated[str | None, Option(help=_ARMS, show_default="these four")] = None,
    repeats: Repeats = 1,
    skip: Skip = 1,
    output: Output = None,
    json: Figures = None,
) -> None:
    """Run arms of a GRPO job one after the other; print one table, write figures, picture and traces."""
    refuse_torchrun("odc compare-grpo")
    folder = Path(output or f"runs/compare-grpo-{time.strftime('%Y%m%d-%H%M%S')}")
    say = progress("compare-grpo")
    say(f"figures and pictures go to {folder}")
    from odc.experiments.compare import CompareConfig
    from odc.experiments.grpo import GrpoConfig, GrpoWorkload
    from odc.experiments.table import tables

    chosen = {} if arms is None else {"arms": tuple(arm.strip() for arm in arms.split(","))}
    workload = GrpoWorkload(GrpoConfig(**given, folder=str(folder)))
    config = CompareConfig(workload, repeats=repeats, skip=skip, **chosen)
    carry_out(config, Path(json or folder / "compare-grpo.json"), say, tables)
