"""Fine-tuning on conversations alone with a model folder of Hugging Face, as it comes from the hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny_job import CONFIG, run_here, tiny_job

from odc.experiments.config import JobConfig
from odc.experiments.results import JobResult
from odc.experiments.text.workload import TextWorkload

Pools = Callable[[int], Any]

pytest.importorskip("transformers", reason="needs the train extra")

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ANSWERS = ["yes", "no", "some", "none at all"]


def model_folder(folder: Path) -> Path:
    """A config, weights and a word-level tokenizer with a chat template; every word and mark is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    marks = ["<|end|>", "<|user|>", "<|assistant|>", "<unk>"]
    words = sorted({"how", "many", *" ".join(ANSWERS).split()})
    rules = Tokenizer(models.WordLevel({name: i for i, name in enumerate(marks + words)}, unk_token="<unk>"))
    rules.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"eos_token": "<|end|>", "unk_token": "<unk>", "additional_special_tokens": marks[1:3]}
    PreTrainedTokenizerFast(tokenizer_object=rules, chat_template=TEMPLATE, **special).save_pretrained(folder)
    Qwen2ForCausalLM(Qwen2Config(**CONFIG)).save_pretrained(folder)
    return folder


def run_job(rank: int, world: int, config: JobConfig) -> JobResult:
    return run_here(config)


def test_a_job_trains_on_chats_alone(ranks: Pools, tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": "how many"}, {"role": "assistant", "content": answer}] for answer in ANSWERS]
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    folder = str(model_folder(tmp_path / "model"))
    config = tiny_job(tmp_path, model=folder, tokenizer="auto", data=str(data), minibatch_size=len(chats), steps=2)
    TextWorkload(config).prepare()
    first, second = ranks(2).run(run_job, config)[0].steps
    answered = sum(len(answer.split()) + 1 for answer in ANSWERS)  # with the mark that ends it
    assert first.label_tokens == second.label_tokens == answered
    assert first.tokens == answered + len(chats) * 5, "the user, two words and an end, the assistant"
    assert second.loss < first.loss
