"""`odc compare` and `odc compare-grpo`: arms, one after the other, on identical data."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from odc.arms import ARM_NAMES
from odc.cli.files import writing
from odc.cli.launched import given_by_launcher, join_launcher, refuse_launcher
from odc.cli.options import options_from
from odc.errors import ConfigError
from odc.experiments.config import DEFAULT_ARMS, GrpoConfig, JobConfig

if TYPE_CHECKING:
    from odc.experiments.compare import CompareConfig
    from odc.experiments.hosts import HostTeam

# The demo: documents of the standard library up to the cap, long enough to be skewed, few enough for two cores.
_DEMO: dict[str, Any] = {
    "model": "qwen2-demo",
    "data": "stdlib",
    "steps": 8,
    "minibatch_size": 8,
    "max_tokens": 4096,
    "long": "drop",
    "lr": 2e-3,
    "warmup": 2,
}
Repeats = Annotated[int, Option(help="Runs of each arm, interleaved.")]
Output = Annotated[
    str | None, Option(help="Folder for figures, pictures and traces.", show_default="runs/COMMAND-DATE")
]
Figures = Annotated[str | None, Option(help="Where the figures go.", show_default="OUTPUT/COMMAND.json")]
Skip = Annotated[int, Option(help="First steps of every run that are not counted.")]


@options_from(
    JobConfig,
    # Arms are compared on the same ranks, and under a launcher nothing starts a rank again.
    without=(
        *("arm", "save_every", "resume", "export", "merge", "valid", "valid_every"),
        *("recover", "keep", "fewest", "rejoin_s"),
    ),
    optional=("model", "data"),
)
def compare(
    given: dict[str, Any],
    demo: Annotated[
        bool, Option("--demo", help="A tiny Qwen2 on the sources of Python's standard library, in a few minutes.")
    ] = False,
    arms: Annotated[str, Option(help=f"Which of {', '.join(ARM_NAMES)}, with commas.")] = ",".join(DEFAULT_ARMS),
    repeats: Repeats = 1,
    skip: Skip = 1,
    output: Output = None,
    json: Figures = None,
) -> None:
    """Run arms one after the other on identical data; print one table, write figures, picture and traces.

    Starts its own ranks on this machine. Under torchrun, srun and the like on several hosts it starts ranks on all of
    them, and host 0 prints and writes.
    """
    show = progress("compare")
    job = (_DEMO if demo else {}) | given
    for name in ("model", "data"):
        if name not in job:
            raise ConfigError(f"{name}: say which (--{name}), or run the demo (--demo)")
    folder = Path(output or new_folder("compare"))
    path = Path(json or folder / "compare.json")
    launched = join_launcher(job) > 0
    if launched:
        job |= given_by_launcher(job)
    in_folder = partial(_comparison, job, tuple(name.strip() for name in arms.split(",")), repeats, skip)
    if not launched:
        config = in_folder(folder, show)
        from odc.experiments.table import tables

        carry_out(config, path, show, tables)
    elif os.environ["LOCAL_RANK"] == "0":  # it starts the ranks of its host; the others have nothing to do
        from torch.distributed.elastic.multiprocessing.errors import record

        record(_compare_over_hosts)(in_folder, folder, path, show)


@options_from(GrpoConfig, without=("arm", "balance", "output", "folder", "save_every", "resume", "recover"))
def compare_grpo(
    given: dict[str, Any],
    arms: Annotated[
        str | None,
        Option(
            help="With commas: fsdp2, fsdp2-resident, odc-equal, odc; ARM/verl takes verl's equal counts.",
            show_default="these four",
        ),
    ] = None,
    repeats: Repeats = 1,
    skip: Skip = 1,
    output: Output = None,
    json: Figures = None,
) -> None:
    """Run arms of a GRPO job one after the other; print one table, write figures, picture and traces."""
    refuse_launcher("odc compare-grpo")
    folder, show = Path(output or new_folder("compare-grpo")), progress("compare-grpo")
    show(f"figures and pictures go to {folder}")
    from odc.experiments.compare import CompareConfig
    from odc.experiments.grpo import GrpoWorkload
    from odc.experiments.table import tables

    workload = GrpoWorkload(GrpoConfig(**given, folder=str(folder)))
    config = CompareConfig(workload, repeats=repeats, skip=skip, **chosen_arms(arms))
    carry_out(config, Path(json or folder / "compare-grpo.json"), show, tables)


def new_folder(command: str) -> str:
    """Where a comparison goes that was given no folder."""
    return f"runs/{command}-{time.strftime('%Y%m%d-%H%M%S')}"


def chosen_arms(arms: str | None) -> dict[str, Any]:
    """What `CompareConfig` is given for `--arms`; nothing for its default."""
    return {} if arms is None else {"arms": tuple(arm.strip() for arm in arms.split(","))}


def _comparison(
    job: dict[str, Any],
    arms: tuple[str, ...],
    repeats: int,
    skip: int,
    folder: Path,
    show: Callable[[str], None] = lambda text: None,
    hosts: int = 1,
) -> CompareConfig:
    """Reports what will run before torch is loaded."""
    config = JobConfig(**job, output=str(folder))
    where = f" on {hosts} hosts" if hosts > 1 else ""
    show(f"{len(arms)} arms, {config.ranks} ranks{where}, {config.steps} steps; figures and pictures go to {folder}")
    from odc.experiments.compare import CompareConfig
    from odc.experiments.text.step import TextWorkload

    return CompareConfig(TextWorkload(config), arms, repeats, skip)


def _compare_over_hosts(
    in_folder: Callable[..., CompareConfig], folder: Path, path: Path, show: Callable[[str], None]
) -> None:
    from odc.experiments.compare import run_arms
    from odc.experiments.hosts import HostTeam
    from odc.experiments.table import tables

    with HostTeam.of_launcher() as team:
        if team.leads:
            carry_out(in_folder(folder, show, team.count), path, show, tables, team)
            return
        with TemporaryDirectory() as spans:  # which host 0 is sent; nothing else is written here
            run_arms(in_folder(Path(spans)), lambda text: None, team)


def carry_out(
    config: Any,
    path: Path,
    show: Callable[[str], None],
    tables: Callable[[dict[str, Any], int], list[Any]],
    team: HostTeam | None = None,
) -> None:
    """Runs a comparison, writes its figures to `path` and its pictures, and prints its tables.

    With a `team` it does so on the host that leads. Raises ConfigError, after the tables, for what cannot be written.
    """
    from rich.console import Console
    from rich.text import Text

    from odc.experiments.compare import write_pictures
    from odc.experiments.report import compare, write_report

    figures, runs = compare(config, path, ["odc", *sys.argv[1:]], show, team)
    console = Console()
    try:
        with writing("json", path):
            write_report(path, figures)
        show("drawing")
        with writing("output", config.output):
            written = {"figures": path} | write_pictures(config, runs)
    finally:  # what was measured is shown though a disk is full
        for table in tables(figures, console.width):
            console.print(table)
    width = max(map(len, written))
    for kind, where in written.items():
        console.print(Text(f"{kind:<{width}}  {shlex.quote(str(where))}"), soft_wrap=True)
    show("done")


def progress(command: str) -> Callable[[str], None]:
    """Prints lines of progress on standard error, with the seconds since this call."""
    began = time.monotonic()

    def show(text: str) -> None:
        print(f"odc {command} [{time.monotonic() - began:5.1f} s] {text}", file=sys.stderr, flush=True)

    return show
