"""A model folder as it comes from the hub, of a few thousand parameters, whose every word and mark is one token."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from support.tiny_job import CONFIG

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ANSWERS = ["yes", "no", "some", "none at all"]
_WORDS = sorted({"how", "many", *" ".join(ANSWERS).split()})


def model_folder(folder: Path) -> Path:
    """A config, weights and a word-level tokenizer with a chat template."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    marks = ["<|end|>", "<|user|>", "<|assistant|>", "<unk>"]
    rules = Tokenizer(models.WordLevel({name: i for i, name in enumerate(marks + _WORDS)}, unk_token="<unk>"))
    rules.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"eos_token": "<|end|>", "unk_token": "<unk>", "additional_special_tokens": marks[1:3]}
    PreTrainedTokenizerFast(tokenizer_object=rules, chat_template=TEMPLATE, **special).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        Qwen2ForCausalLM(Qwen2Config(**CONFIG, initializer_range=0.2)).save_pretrained(folder)
    return folder


def completions(count: int) -> list[dict[str, str]]:
    """Rows of `prompt` and `completion`, of very different lengths."""
    draw = random.Random(count)
    sizes = [(1 + draw.randrange(9), 1 + int(40 * draw.random() ** 3)) for _ in range(count)]
    return [
        {
            "prompt": " ".join(draw.choices(_WORDS, k=asked)),
            "completion": " " + " ".join(draw.choices(_WORDS, k=message)),
        }
        for asked, message in sizes
    ]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def transformers_loss(model: Any, folder: Path, rows: Iterable[dict[str, str]]) -> float:
    """The mean loss of every completion's tokens and its end, as transformers computes it, one row at a time."""
    import torch
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    total = tokens = 0.0
    for row in rows:
        asked, message = (
            tokenizer(row[name], add_special_tokens=False)["input_ids"] for name in ("prompt", "completion")
        )
        ids = torch.tensor([[*asked, *message, tokenizer.eos_token_id]])
        labels = ids.clone()
        labels[:, : len(asked)] = -100
        with torch.no_grad():
            loss = model.eval()(input_ids=ids, labels=labels).loss
        total += float(loss) * (len(message) + 1)
        tokens += len(message) + 1
    return total / tokens
