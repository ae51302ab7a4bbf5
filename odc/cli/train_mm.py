"""`odc train-mm`: a multimodal model under every balance and transport, in one table."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from odc.cli.compare import Figures, Output, Repeats, Skip, carry_out, progress
from odc.cli.options import options_from
from odc.errors import ConfigError

_MODEL = "mm-demo"
_DEMO: dict[str, Any] = {"steps": 5, "minibatch_size": 12, "max_tokens": 8192, "lr": 1e-3}
_ARMS = (
    "TRANSPORT/BALANCE, with commas: fsdp2, odc; none, llm-only, all-pad, all-rmpad, all-gather, full. (default: all)"
)
_TEXT_ONLY = ("tokenizer", "vocab", "precision", "activation_checkpointing", "cache", "device", "long", "slow")
_NOT_YET = ("valid", "valid_every", "lora", "lora_alpha", "lora_dropout", "lora_targets", "merge")


@options_from(
    "odc.experiments.config:JobConfig",
    without=("arm", "save_every", "resume", "export", *_TEXT_ONLY, *_NOT_YET),
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
    arms: Annotated[str | None, Option(help=_ARMS)] = None,
    per_node: Annotated[int, Option(help="Ranks of one declared node.")] = 1,
    repeats: Repeats = 1,
    skip: Skip = 1,
    output: Output = None,
    json: Figures = None,
) -> None:
    """Train a vision tower, an audio encoder and a language model under every balance and transport; print a table."""
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
    from odc.experiments.multimodal.figures import table
    from odc.experiments.multimodal.workload import MultimodalWorkload
    from odc.experiments.preflight import require

    for package in ("transformers", "PIL", "soundfile"):
        require(package, "multimodal", "train-mm")
    if "data" not in fields:
        say("making a corpus")
        fields["data"] = str(write_corpus(Path(folder) / "corpus", CorpusConfig(seed=fields.get("seed", 0))))
    job = MultimodalConfig(JobConfig(**fields, output=folder), per_node=per_node)
    chosen = {} if arms is None else {"arms": tuple(arm.strip() for arm in arms.split(","))}
    config = CompareConfig(MultimodalWorkload(job), repeats=repeats, skip=skip, **chosen)
    carry_out(config, Path(json or Path(folder) / "train-mm.json"), say, lambda figures, _: [table(figures)])
