"""`odc train`: one job of supervised fine-tuning."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from typer import Option

from odc.arms import ARM_NAMES
from odc.cli import options
from odc.experiments.config import JobConfig

_FILES = "Files"


def train(
    model: Annotated[str, Option(help="Hugging Face config (JSON) or model folder, or a shipped config's name.")],
    data: Annotated[
        str, Option(help="Folder of text files, JSONL with `text` or `messages`, datasets folder, or `stdlib`.")
    ],
    arm: Annotated[str | None, Option(help=f"One of {', '.join(ARM_NAMES)}. [default: odc]")] = None,
    output: Annotated[
        str | None, Option(help="New folder for checkpoints and steps.jsonl, or --resume's.", rich_help_panel=_FILES)
    ] = None,
    save_every: Annotated[
        int | None, Option(help="Steps between checkpoints. [default: only at the end]", rich_help_panel=_FILES)
    ] = None,
    resume: Annotated[
        str | None, Option(help="Checkpoint, or output folder (its latest).", rich_help_panel=_FILES)
    ] = None,
    export: Annotated[
        str | None, Option(help="Folder for the model as Hugging Face safetensors.", rich_help_panel=_FILES)
    ] = None,
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
    """Fine-tune a causal language model on text, sharded over ranks.

    Starts its own ranks on this machine. Under torchrun it runs as one rank, and torchrun says how many there are.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is not None and world is not None:
        from torch.distributed.elastic.multiprocessing.errors import record

        from odc.experiments.job import run_rank
        from odc.experiments.text.workload import TextWorkload

        result = record(run_rank)(TextWorkload(JobConfig(**(given | {"ranks": int(world)}))))
        if rank == "0" and result is not None:
            print(result.summary())
        return
    config = JobConfig(**given)
    print(f"odc train: {config.arm}, {config.ranks} ranks, {config.steps} steps", file=sys.stderr, flush=True)
    from odc.experiments.job import run
    from odc.experiments.text.workload import TextWorkload

    print(run(TextWorkload(config))[0].summary())
