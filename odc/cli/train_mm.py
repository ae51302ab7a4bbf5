"""`odc train-mm`: a multimodal model under every balance and transport, in one table."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from odc.cli import options
from odc.errors import ConfigError
from odc.experiments.config import JobConfig

_DEMO: dict[str, Any] = {"model": "mm-demo", "steps": 5, "minibatch_size": 12, "max_tokens": 8192, "lr": 1e-3}


def train_mm(
    model: Annotated[
        str | None, Option(help="Multimodal config (JSON), or a shipped one's name. [default: mm-demo]")
    ] = None,
    data: Annotated[
        str | None, Option(help="JSONL of `messages` with text, image and audio parts; files relative to it.")
    ] = None,
    demo: Annotated[
        bool, Option("--demo", help="On a corpus made up for it, whose examples differ wildly in their modalities.")
    ] = False,
    arms: Annotated[
        str | None,
        Option(
            help="TRANSPORT/BALANCE with commas: fsdp2 or odc; none, llm-only, all-pad, all-rmpad, all-gather or full."
        ),
    ] = None,
    per_node: Annotated[int, Option(help="Ranks of one declared node.")] = 1,
    repeats: Annotated[int, Option(help="Runs of each arm, interleaved.")] = 1,
    skip: Annotated[int, Option(help="First steps of every run that are not counted.")] = 1,
    output: Annotated[
        str | None, Option(help="Folder for figures, pictures and traces. [default: runs/train-mm-DATE]")
    ] = None,
    json: Annotated[str | None, Option(help="Where the figures go. [default: OUTPUT/train-mm.json]")] = None,
    ranks: options.Ranks = None,
    steps: options.Steps = None,
    minibatch_size: options.MinibatchSize = None,
    max_tokens: Annotated[int | None, Option(help="Most positions of one example. [default: 4096]")] = None,
    seed: options.Seed = None,
    lr: options.Lr = None,
    warmup: options.Warmup = None,
    min_lr: options.MinLr = None,
    weight_decay: options.WeightDecay = None,
    clip: options.Clip = None,
    reproducible: options.Reproducible = None,
    accumulate: options.Accumulate = None,
    timeout_s: options.Timeout = None,
) -> None:
    """Train a vision tower, an audio encoder and a language model under every balance and transport; print a table."""
    own = {"demo", "arms", "per_node", "repeats", "skip", "output", "json"}
    given = {name: value for name, value in locals().items() if value is not None and name not in {"own", *own}}
    fields = {"model": "mm-demo", **(_DEMO if demo else {}), **given}
    if "data" not in fields and not demo:
        raise ConfigError("data: say which (--data), or run the demo (--demo)")
    folder = output or f"runs/train-mm-{time.strftime('%Y%m%d-%H%M%S')}"
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"odc train-mm [{time.monotonic() - began:5.1f} s] {text}", file=sys.stderr, flush=True)

    say(f"figures and pictures go to {folder}")
    from odc.experiments.compare import CompareConfig
    from odc.experiments.multimodal.config import MultimodalConfig
    from odc.experiments.multimodal.corpus import CorpusConfig, write_corpus
    from odc.experiments.multimodal.workload import MultimodalWorkload

    if "data" not in fields:
        say("making a corpus")
        fields["data"] = str(write_corpus(Path(folder) / "corpus", CorpusConfig(seed=fields.get("seed", 0))))
    job = MultimodalConfig(JobConfig(**fields, output=folder), per_node=per_node)
    chosen = {} if arms is None else {"arms": tuple(arm.strip() for arm in arms.split(","))}
    _compare(
        CompareConfig(MultimodalWorkload(job), repeats=repeats, skip=skip, **chosen), Path(json) if json else None, say
    )


def _compare(config: Any, json: Path | None, say: Any) -> None:
    from rich.console import Console

    from odc.experiments.multimodal.figures import table
    from odc.experiments.report import compare

    figures, written = compare(config, json or config.output / "train-mm.json", ["odc", *sys.argv[1:]], say)
    console = Console()
    console.print(table(figures))
    width = max(map(len, written))
    for kind, where in written.items():
        console.print(f"{kind:<{width}}  {shlex.quote(str(where))}", highlight=False, soft_wrap=True)
    say("done")
