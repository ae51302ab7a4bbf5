"""`odc train-mm`: a multimodal model under every balance and transport, in one table."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from odc.cli.compare import carry_out, progress
from odc.cli.options import options_from
from odc.errors import ConfigError

_MODEL = "mm-demo"
_DEMO: dict[str, Any] = {"steps": 5, "minibatch_size": 12, "max_tokens": 8192, "lr": 1e-3}
_TEXT_ONLY = ("tokenizer", "vocab", "precision", "activation_checkpointing", "cache", "device", "long", "slow")


@options_from(
    "odc.experiments.compare:CompareConfig",
    "odc.experiments.config:JobConfig",
    without=("arm", "save_every", "resume", "export", *_TEXT_ONLY),
    optional=("data",),
    helps={
        "data": "JSONL of `messages` with text, image and audio parts; files relative to it.",
        "max_tokens": "Most positions of one example.",
    },
)
def train_mm(
    given: dict[str, Any],
    model: Annotated[str, Option(help="Multimodal config (JSON), or a shipped one's name.")] = _MODEL,
    demo: Annotated[
        bool, Option("--demo", help="On a corpus made up for it, whose examples differ wildly in their modalities.")
    ] = False,
    arms: Annotated[
        str | None,
        Option(
            help="TRANSPORT/BALANCE with commas: fsdp2 or odc; none, llm-only, all-pad, all-rmpad, all-gather or full. "
            "(default: all)"
        ),
    ] = None,
    per_node: Annotated[int, Option(help="Ranks of one declared node.")] = 1,
    output: Annotated[
        str | None, Option(help="Folder for figures, pictures and traces. (default: runs/train-mm-DATE)")
    ] = None,
    json: Annotated[str | None, Option(help="Where the figures go. (default: OUTPUT/train-mm.json)")] = None,
) -> None:
    """Train a vision tower, an audio encoder and a language model under every balance and transport; print a table."""
    comparison: dict[str, Any] = {name: given.pop(name) for name in ("repeats", "skip") if name in given}
    fields = {"model": model, **(_DEMO if demo else {}), **given}
    if "data" not in fields and not demo:
        raise ConfigError("data: say which (--data), or run the demo (--demo)")
    folder = output or f"runs/train-mm-{time.strftime('%Y%m%d-%H%M%S')}"
    say = progress("train-mm")
    say(f"figures and pictures go to {folder}")
    from odc.experiments.compare import CompareConfig
    from odc.experiments.config import JobConfig
    from odc.experiments.multimodal.config import MultimodalConfig
    from odc.experiments.multimodal.corpus import CorpusConfig, write_corpus
    from odc.experiments.multimodal.workload import MultimodalWorkload

    if "data" not in fields:
        say("making a corpus")
        fields["data"] = str(write_corpus(Path(folder) / "corpus", CorpusConfig(seed=fields.get("seed", 0))))
    job = MultimodalConfig(JobConfig(**fields, output=folder), per_node=per_node)
    if arms is not None:
        comparison["arms"] = tuple(arm.strip() for arm in arms.split(","))
    config = CompareConfig(MultimodalWorkload(job), **comparison)
    from odc.experiments.multimodal.figures import table

    path = Path(json) if json else config.output / "train-mm.json"
    carry_out(config, path, say, lambda figures, _: [table(figures)])
