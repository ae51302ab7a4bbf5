"""A job small enough for tests: a model of a few thousand parameters, some lines of text, ranks that run it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch.distributed as dist

from odc.experiments.config import JobConfig
from odc.experiments.job import RankJob
from odc.experiments.progress import Progress
from odc.experiments.results import JobResult
from odc.experiments.text.step import TextStep, TextWorkload
from odc.fsdp import shutdown

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def tiny_job(folder: Path, **changes: Any) -> JobConfig:
    """A job on files made in `folder`: 40 texts of 4 to 90 bytes, as skewed as real ones."""
    model, data = folder / "model.json", folder / "data.jsonl"
    if not data.exists():
        model.write_text(json.dumps(CONFIG))
        draw = random.Random(5)
        texts = [
            "".join(draw.choice("abcdefgh \n") for _ in range(int(4 + 86 * draw.random() ** 3))) for _ in range(40)
        ]
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    fields: dict[str, Any] = {
        "model": str(model),
        "data": str(data),
        "tokenizer": "bytes",
        "max_tokens": 96,
        "minibatch_size": 6,
        "steps": 3,
        "lr": 1e-2,
        "eps": 1e-4,
        "timeout_s": 60.0,
        "cache": str(folder / "cache"),
    }
    return JobConfig(**(fields | changes))


def rank_job(config: JobConfig) -> RankJob:
    """This rank's part of the job, built inside a process group that is there already."""
    return RankJob(TextWorkload(config), Progress(config.steps, shown=False))


def complete(job: RankJob) -> Any:
    """Runs a job on a rank of a pool, whose process group is there already, and leaves odc in good order."""
    result = job.run()
    dist.barrier()  # no rank leaves while another still collects
    shutdown()
    return result


def run_job(rank: int, world: int, config: JobConfig) -> JobResult[TextStep]:
    """The job on a rank of a pool."""
    result: JobResult[TextStep] = complete(rank_job(config))
    return result
