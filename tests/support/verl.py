"""verl on CPU ranks: how to import it, a tiny model on disk, and verl's stock SFT trainer on it."""

from __future__ import annotations

import importlib
import os
import random
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

WORDS = 60

needs_verl = pytest.mark.skipif(find_spec("verl") is None, reason="needs verl: make test-integrations")


def import_verl(name: str = "verl") -> Any:
    """A module of verl, on the platform "cpu"; warnings of its imports are not ours."""
    os.environ["VERL_PLATFORM"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def save_tiny_tokenizer(folder: Path) -> int:
    """Of words w0, w1, ... with a chat template, in a folder beside the model's, whose type would decide on its class.

    Returns the number of words.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<end>", "<user>", "<assistant>"]
    vocab = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    fast.save_pretrained(folder / "tokenizer")
    return len(vocab)


def save_tiny_model(folder: Path) -> None:
    """A Qwen2 of two layers with random weights, and a tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    words = save_tiny_tokenizer(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=words, num_key_value_heads=1, tie_word_embeddings=False, **sizes)
    config._attn_implementation = "sdpa"
    Qwen2ForCausalLM(config).save_pretrained(folder)


def save_chats(path: Path, samples: int, seed: int = 0) -> None:
    """Questions and answers of very different lengths, as verl's SFT trainer reads them."""
    import pandas as pd

    draw = random.Random(seed)
    rows = []
    for _ in range(samples):
        length = min(100, int(draw.lognormvariate(2.5, 1)) + 2)
        words = [f"w{(i * i) % WORDS}" for i in range(length)]
        rows.append([{"role": "user", "content": words[0]}, {"role": "assistant", "content": " ".join(words[1:])}])
    pd.DataFrame({"messages": rows}).to_parquet(path)


def sft_changes(model: Path, data: Path, out: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """What to change in the configuration of verl's SFT trainer, by dotted names: for CPU, and `changes`."""
    return {
        "data.train_files": data,
        "data.train_batch_size": 8,
        "data.max_token_len_per_gpu": 110,
        "data.max_length": 128,
        "data.num_workers": 0,
        "data.ignore_input_ids_mismatch": True,
        "model.path": model,
        "model.tokenizer_path": model / "tokenizer",
        "model.use_remove_padding": False,
        "model.enable_gradient_checkpointing": False,
        "+model.override_config.attn_implementation": "sdpa",
        "engine.use_torch_compile": False,
        "+engine.mixed_precision.param_dtype": "fp32",
        "optim.lr": 1e-2,
        "optim.lr_scheduler_type": "constant",
        "trainer.logger": "[console]",
        "trainer.default_local_dir": out,
        "trainer.device": "cpu",
        "trainer.total_epochs": 2,
        **changes,
    }


def join_as_verl(rank: int, world: int) -> None:
    """Set what torchrun would have set; the process group is there."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": "1", "LOCAL_WORLD_SIZE": str(world)}
    import_verl("verl.workers.engine_workers")
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    if "cpu" not in EngineRegistry._engines["language_model"]["fsdp2"]:  # the baseline
        EngineRegistry.register("language_model", "fsdp2", device="cpu")(FSDPEngineWithLMHead)
        EngineRegistry.register("value_model", "fsdp2", device="cpu")(FSDPEngineWithValueHead)


def fit(
    rank: int, world: int, changes: dict[str, Any], model: Path, data: Path, out: Path
) -> tuple[list[dict[str, float]], list[int]]:
    """Run verl's stock SFT trainer on a rank.

    Returns what it logged at each step, on rank 0, and how many microbatches this rank trained on in each.
    """
    join_as_verl(rank, world)
    from hydra import compose, initialize_config_module
    from verl.trainer import sft_trainer

    with initialize_config_module("verl.trainer.config", version_base=None):
        overrides = [f"{key}={value}" for key, value in sft_changes(model, data, out, changes).items()]
        config = compose("sft_trainer_engine", overrides)
    logged: list[dict[str, float]] = []
    counts: list[int] = []

    class Log:
        def __init__(self, **unused: Any) -> None: ...

        def log(self, data: dict[str, float], step: int) -> None:
            logged.append({"step": step, **data})

    sft_trainer.Tracking = Log
    trainer = sft_trainer.SFTTrainer(config)
    train, step = trainer.engine.train_batch, trainer.engine.forward_step

    def train_batch(*args: Any, **options: Any) -> Any:
        counts.append(0)
        return train(*args, **options)

    def forward_step(*args: Any, forward_only: bool, **options: Any) -> Any:
        counts[-1:] = [count + (not forward_only) for count in counts[-1:]]
        return step(*args, forward_only=forward_only, **options)

    trainer.engine.train_batch, trainer.engine.forward_step = train_batch, forward_step
    trainer.fit()
    return logged, counts
