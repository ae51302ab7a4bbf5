"""`odc compare`: the arms, one after the other, on identical data."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from odc.cli.options import options_from
from odc.errors import ConfigError

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
_COMPARISON = ("arms", "repeats", "skip")  # fields of the comparison; the others are the job's


@options_from(
    "odc.experiments.compare:CompareConfig",
    "odc.experiments.config:JobConfig",
    without=("arm", "save_every", "resume", "export"),
    optional=("model", "data"),
)
def compare(
    given: dict[str, Any],
    demo: Annotated[
        bool, Option("--demo", help="A tiny Qwen2 on the sources of Python's standard library, in a few minutes.")
    ] = False,
    output: Annotated[
        str | None, Option(help="Folder for figures, pictures and traces. (default: runs/compare-DATE)")
    ] = None,
    json: Annotated[str | None, Option(help="Where the figures go. (default: OUTPUT/compare.json)")] = None,
) -> None:
    """Run arms one after the other on identical data; print one table, write figures, picture and traces."""
    say = progress("compare")
    comparison = {name: given.pop(name) for name in _COMPARISON if name in given}
    job = (_DEMO if demo else {}) | given
    for name in ("model", "data"):
        if name not in job:
            raise ConfigError(f"{name}: say which (--{name}), or run the demo (--demo)")
    from odc.experiments.compare import CompareConfig
    from odc.experiments.config import JobConfig

    folder = output or f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}"
    config = CompareConfig(JobConfig(**job, output=folder), **comparison)
    say(f"{len(config.arms)} arms, {config.job.ranks} ranks, {config.job.steps} steps; output goes to {folder}")
    from odc.experiments.compare import run_arms, write_pictures
    from odc.experiments.report import report
    from odc.experiments.table import tables

    path = Path(json) if json else config.output / "compare.json"
    carry_out(config, path, say, run_arms, report, tables, write_pictures)


def carry_out(
    config: Any,
    path: Path,
    say: Callable[[str], None],
    run_arms: Callable[..., Any],
    report: Callable[..., dict[str, Any]],
    tables: Callable[[dict[str, Any], int], list[Any]],
    write_pictures: Callable[[Any], dict[str, Path]],
) -> None:
    """Runs a comparison, writes its figures to `path` and its pictures, and prints its tables for the console's width.

    The functions are those of the workload; `config` is what they take.
    """
    from rich.console import Console

    from odc.experiments.preflight import writable_folder
    from odc.experiments.report import write_report
    from odc.provenance import begin

    begun = begin()
    writable_folder(path.parent, "json")
    figures = report(config, run_arms(config, say), ["odc", *sys.argv[1:]]) | begun.facts()
    write_report(path, figures)
    say("drawing")
    written = {"figures": path} | write_pictures(config)
    console = Console()
    for table in tables(figures, console.width):
        console.print(table)
    width = max(map(len, written))
    for kind, where in written.items():
        console.print(f"{kind:<{width}}  {shlex.quote(str(where))}", highlight=False, soft_wrap=True)
    say("done")


def progress(command: str) -> Callable[[str], None]:
    """Prints lines of progress on standard error, with the seconds since this call."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"odc {command} [{time.monotonic() - began:5.1f} s] {text}", file=sys.stderr, flush=True)

    return say
