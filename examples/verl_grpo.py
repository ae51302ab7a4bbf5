"""A tiny task for verl's GRPO on CPUs: answer in lower-case letters. No words are needed, so nothing is downloaded.

    python examples/verl_grpo.py                                # writes model/ and prompts.parquet into this folder
    examples/verl_grpo.sh trainer.total_training_steps=60       # trains, writes metrics.jsonl
    python examples/verl_grpo.py metrics.jsonl reward.svg       # draws the reward of each step

verl also loads this file for `compute_score`, its reward function.
"""

from __future__ import annotations

import json
import random
import string
import sys
from pathlib import Path
from typing import Any

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """The share of an answer's characters that are lower-case ASCII letters."""
    return sum(one in string.ascii_lowercase for one in solution_str) / max(1, len(solution_str))


def write_model(folder: Path) -> None:
    """A Qwen2 of two random layers with a tokenizer of 256 bytes: 110,000 parameters."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *sorted(ByteLevel.alphabet())])}
    names: dict[str, Any] = {"pad_token": SPECIAL[0], "eos_token": SPECIAL[2], "extra_special_tokens": SPECIAL[1:2]}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], **names)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": None, "pad_token_id": 0, "eos_token_id": 2}
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=len(vocabulary), num_key_value_heads=1, initializer_range=0.05, **sizes, **ends)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def write_prompts(path: Path, rows: int = 64) -> None:
    """Questions of 2 to 12 letters, as verl's RL trainers read them."""
    import pandas

    draw = random.Random(0)
    questions = ["".join(draw.choices(string.ascii_letters, k=draw.randint(2, 12))) for _ in range(rows)]
    table = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, question in enumerate(questions)
    ]
    pandas.DataFrame(table).to_parquet(path)


def draw_rewards(metrics: Path, picture: Path) -> None:
    """Draw the mean reward of each step that verl's logger "file" wrote."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "odc"  # equal metrics draw equal files
    from matplotlib import pyplot

    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    found = [(one["step"], one["data"]["critic/score/mean"]) for one in lines if "critic/score/mean" in one["data"]]
    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    axes.plot(*zip(*found, strict=True))
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


if __name__ == "__main__":
    if sys.argv[1:]:
        draw_rewards(*map(Path, sys.argv[1:3]))
    else:
        write_model(Path("model"))
        write_prompts(Path("prompts.parquet"))
