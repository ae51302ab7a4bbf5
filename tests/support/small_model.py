"""A job of a few thousand parameters, and running it on a pool's ranks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from odc.experiments.grpo import GrpoConfig, GrpoResult, GrpoWorkload, rollout
from odc.experiments.grpo.generator import Generator
from odc.experiments.grpo.samples import Response
from odc.experiments.grpo.worker import answer
from odc.experiments.job import RankJob
from odc.experiments.progress import Progress
from odc.fsdp import shutdown
from odc.handover import Reader

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


def toy(folder: Path, /, **changes: Any) -> GrpoConfig:
    """A job on a model made in `folder`."""
    model = folder / "model.json"
    model.write_text(json.dumps(CONFIG))
    fields: dict[str, Any] = {"model": str(model), "response_tokens": 24, "max_tokens": 64}
    return GrpoConfig(**(fields | {"steps": 3, "lr": 1e-2, "timeout_s": 250.0} | changes))


class RolloutHere(contextlib.AbstractContextManager["RolloutHere"]):
    """What the rollout process does, on rank 0 and at once: no interpreter has to start, the rest is the same."""

    def __init__(self, config: GrpoConfig, stop_ids: Sequence[int], handle: str | None) -> None:
        self.generator = Generator(config, Path(config.model), stop_ids)
        self.reader = Reader(handle) if handle else None

    def ask(self, step: int, prompts: Any, *, at_least: int = 1, weights: Any = None) -> None:
        sent = {name: tensor.numpy() for name, tensor in (weights or {}).items()}
        request = {"step": step, "prompts": prompts, "at_least": at_least, "weights": sent}
        self.answer = answer(self.generator, self.reader, request)
        read = self.answer["version"]
        assert read in (None, at_least), f"asked for version {at_least} or newer, and {read} is the newest there is"

    def collect(self, check: object = None) -> tuple[int | None, list[Response]]:
        return self.answer["version"], self.answer["responses"]

    def __exit__(self, *unused: object) -> None:
        if self.reader is not None:
            self.reader.close()


def train(config: GrpoConfig) -> GrpoResult:
    """The job, inside a process group that is there already."""
    result: GrpoResult = RankJob(GrpoWorkload(config), Progress(config.steps, shown=False)).run()
    return result


def train_each(rank: int, world: int, configs: list[GrpoConfig]) -> list[GrpoResult]:
    """The jobs one after the other, on a rank of a pool; each leaves odc in good order."""
    results = []
    rollout.Rollout = RolloutHere  # type: ignore[assignment, misc]
    for config in configs:
        results.append(train(config))
        dist.barrier()
        shutdown()
    return results
