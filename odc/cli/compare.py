"""`odc compare`: the arms, one after the other, on identical data."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any, cast

from typer import Option

from odc.arms import ARM_NAMES, ArmName
from odc.cli import options
from odc.errors import ConfigError
from odc.experiments.config import DEFAULT_ARMS, JobConfig

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


def compare(
    model: Annotated[
        str | None, Option(help="Hugging Face config (JSON) or model folder, or a shipped config's name.")
    ] = None,
    data: Annotated[
        str | None, Option(help="Folder of text files, JSONL with `text` or `messages`, datasets folder, or `stdlib`.")
    ] = None,
    demo: Annotated[
        bool, Option("--demo", help="A tiny Qwen2 on the sources of Python's standard library, in a few minutes.")
    ] = False,
    arms: Annotated[str, Option(help=f"Which of {', '.join(ARM_NAMES)}, with commas.")] = ",".join(DEFAULT_ARMS),
    repeats: Annotated[int, Option(help="Runs of each arm, interleaved.")] = 1,
    skip: Annotated[int, Option(help="First steps of every run that are not counted.")] = 1,
    output: Annotated[
        str | None, Option(help="Folder for figures, pictures and traces. [default: runs/compare-DATE]")
    ] = None,
    json: Annotated[str | None, Option(help="Where the figures go. [default: OUTPUT/compare.json]")] = None,
    tokenizer: options.Tokenizer = None,
    vocab: options.Vocab = None,
    precision: options.Precision = None,
    activation_checkpointing: options.Checkpointing = None,
    cache: options.Cache = None,
    ranks: options.Ranks = None,
    per_node: options.PerNode = None,
    device: options.Device = None,
    steps: options.Steps = None,
    minibatch_size: options.MinibatchSize = None,
    max_tokens: options.MaxTokens = None,
    long: options.Long = None,
    seed: options.Seed = None,
    lr: options.Lr = None,
    warmup: options.Warmup = None,
    min_lr: options.MinLr = None,
    weight_decay: options.WeightDecay = None,
    clip: options.Clip = None,
    reproducible: options.Reproducible = None,
    accumulate: options.Accumulate = None,
    timeout_s: options.Timeout = None,
    slow: options.Slow = None,
) -> None:
    """Run arms one after the other on identical data; print one table, write figures, picture and traces."""
    own = {"demo", "arms", "repeats", "skip", "output", "json"}
    given = {name: value for name, value in locals().items() if value is not None and name not in {"own", *own}}
    fields = (_DEMO if demo else {}) | given
    for name in ("model", "data"):
        if name not in fields:
            raise ConfigError(f"{name}: say which (--{name}), or run the demo (--demo)")
    folder = output or f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}"
    names = tuple(cast(ArmName, name.strip()) for name in arms.split(","))
    _compare(JobConfig(**fields, output=folder), names, repeats, skip, Path(json) if json else None)


def _compare(job: JobConfig, arms: tuple[ArmName, ...], repeats: int, skip: int, json: Path | None) -> None:
    began = time.monotonic()
    _say(began, f"{len(arms)} arms, {job.ranks} ranks, {job.steps} steps; figures and pictures go to {job.output}")
    from odc.experiments.compare import CompareConfig
    from odc.experiments.report import compare
    from odc.experiments.table import tables
    from odc.experiments.text.workload import TextWorkload

    config = CompareConfig(TextWorkload(job), arms, repeats, skip)
    path = json or config.output / "compare.json"
    figures, written = compare(config, path, ["odc", *sys.argv[1:]], lambda text: _say(began, text))
    from rich.console import Console

    console = Console()
    for table in tables(figures, console.width):
        console.print(table)
    width = max(map(len, written))
    for kind, where in written.items():
        console.print(f"{kind:<{width}}  {shlex.quote(str(where))}", highlight=False, soft_wrap=True)
    _say(began, "done")


def _say(began: float, text: str) -> None:
    print(f"odc compare [{time.monotonic() - began:5.1f} s] {text}", file=sys.stderr, flush=True)
