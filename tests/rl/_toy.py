"""A job of a few thousand parameters, and running it on a pool's ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from odc.fsdp import shutdown
from odc.rl import GrpoConfig, GrpoResult
from odc.rl.job import train

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def toy(folder: Path, **changes: Any) -> GrpoConfig:
    """A job on a model made in `folder`."""
    model = folder / "model.json"
    model.write_text(json.dumps(CONFIG))
    fields: dict[str, Any] = {"model": str(model), "objective": "odc", "response_tokens": 24, "max_tokens": 64}
    return GrpoConfig(**(fields | {"steps": 3, "lr": 1e-2, "timeout_s": 250.0} | changes))


def train_each(rank: int, world: int, configs: list[GrpoConfig]) -> list[GrpoResult]:
    """The jobs one after the other, on a rank of a pool; each leaves odc in good order."""
    results = []
    for config in configs:
        results.append(train(config))
        dist.barrier()
        shutdown()
    return results
