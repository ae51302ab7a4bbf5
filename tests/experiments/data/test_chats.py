"""Fine-tuning on conversations alone with a model folder of Hugging Face, as it comes from the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny_job import run_here, tiny_job
from support.word_model import ANSWERS, model_folder, write_rows

from odc.experiments.config import JobConfig
from odc.experiments.results import JobResult
from odc.experiments.text.workload import TextWorkload

Pools = Callable[[int], Any]

pytest.importorskip("transformers", reason="needs the train extra")


def run_job(rank: int, world: int, config: JobConfig) -> JobResult:
    return run_here(config)


def test_a_job_trains_on_chats_alone(ranks: Pools, tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": "how many"}, {"role": "assistant", "content": answer}] for answer in ANSWERS]
    data = write_rows(tmp_path / "chat.jsonl", ({"messages": chat} for chat in chats))
    folder = str(model_folder(tmp_path / "model"))
    config = tiny_job(tmp_path, model=folder, tokenizer="auto", data=str(data), minibatch_size=len(chats), steps=2)
    TextWorkload(config).prepare()
    first, second = ranks(2).run(run_job, config)[0].steps
    answered = sum(len(answer.split()) + 1 for answer in ANSWERS)  # with the mark that ends it
    assert first.label_tokens == second.label_tokens == answered
    assert first.tokens == answered + len(chats) * 5, "the user, two words and an end, the assistant"
    assert second.loss < first.loss
