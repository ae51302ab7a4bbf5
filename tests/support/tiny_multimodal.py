"""A multimodal job small enough for tests: towers of some thousand parameters and a corpus of small real files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from odc.experiments.config import JobConfig
from odc.experiments.job import RankJob
from odc.experiments.multimodal.config import MultimodalConfig
from odc.experiments.multimodal.corpus import CorpusConfig, write_corpus
from odc.experiments.multimodal.model import ModelConfig
from odc.experiments.multimodal.step import MultimodalResult
from odc.experiments.multimodal.workload import MultimodalWorkload
from odc.experiments.progress import Progress
from support.tiny_job import complete

FIELDS: dict[str, Any] = {
    "vision_config": {
        "depth": 2,
        "embed_dim": 16,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
    },
    "audio_config": {
        "d_model": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "num_mel_bins": 8,
        "max_source_positions": 100,
    },
    "text_config": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    "audio_downsample": 2,
    "max_pixels": 1600,
}
CONFIG = ModelConfig(FIELDS)
CORPUS = CorpusConfig(examples=24, side=24, seconds=0.5, words=12, most_seconds=1.5, spread=0.6)


def tiny_job(folder: Path, balance: str = "full", per_node: int = 1, **changes: Any) -> MultimodalConfig:
    """A job on files made in `folder`."""
    model, data = folder / "model.json", folder / "corpus.jsonl"
    if not model.exists():
        model.write_text(json.dumps(FIELDS))
        write_corpus(folder, CORPUS)
    fields: dict[str, Any] = {
        "model": str(model),
        "data": str(data),
        "max_tokens": 1024,
        "minibatch_size": 6,
        "steps": 3,
        "lr": 1e-2,
        "eps": 1e-4,
        "timeout_s": 60.0,
    }
    return MultimodalConfig(JobConfig(**(fields | changes)), balance, per_node)  # type: ignore[arg-type]


def write_examples(folder: Path, kinds: list[str]) -> Path:
    """A corpus of examples of chosen kinds: letters i (image) and a (audio) of what each one has, "" for text alone."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    pool = write_corpus(folder / "pool", CORPUS)
    parts = [p for line in pool.read_text().splitlines() for p in json.loads(line)["messages"][0]["content"]]
    media = {"i": [p for p in parts if p["type"] == "image"], "a": [p for p in parts if p["type"] == "audio"]}
    for number, kind in enumerate(kinds):
        content: list[dict[str, Any]] = [{"type": "text", "text": "look " * (number % 3 + 1)}]
        for at, letter in enumerate(kind):
            part = dict(media[letter][(number + at) % len(media[letter])])
            part[part["type"]] = "pool/" + part[part["type"]]
            content += [part, {"type": "text", "text": "and"}]
        answer = {"role": "assistant", "content": f"answer {number}" * (number % 2 + 1)}
        lines.append(json.dumps({"messages": [{"role": "user", "content": content}, answer]}))
    path = folder / "corpus.jsonl"
    path.write_text("\n".join(lines))
    return path


def rank_job(config: MultimodalConfig) -> RankJob:
    """This rank's part of the job, built inside a process group that is there already."""
    return RankJob(MultimodalWorkload(config), Progress(config.job.steps, shown=False))


def run_job(rank: int, world: int, config: MultimodalConfig) -> MultimodalResult:
    """The job on a rank of a pool."""
    result: MultimodalResult = complete(rank_job(config))
    return result
