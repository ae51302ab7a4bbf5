"""A small run of Hugging Face's Trainer against the same run of OdcTrainer, on two CPU ranks."""

from __future__ import annotations

import os
import random
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="needs transformers and accelerate: make test-integrations",
)


def samples() -> list[dict[str, list[int]]]:
    draw = random.Random(0)
    lengths = [min(60, int(draw.lognormvariate(2.5, 1)) + 2) for _ in range(32)]
    return [{"input_ids": [(start + i * i) % 60 for i in range(length)]} for start, length in enumerate(lengths)]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[i, : len(row["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(rank: int, world: int, ours: bool, folder: Path, resume: str | None = None) -> tuple[list[Any], float]:
    """Logged losses and gradient norms, and the loss of a last evaluation."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = "1"
    warnings.simplefilter("ignore")  # a pool rank is left as it is; none of these are ours
    from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

    from odc.integrations.transformers import OdcTrainer

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=60, num_attention_heads=2, num_key_value_heads=1, **sizes))
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=3,
        report_to="none",
        disable_tqdm=True,
    )
    kind = OdcTrainer if ours else Trainer
    trainer = kind(model=model, args=args, train_dataset=samples(), eval_dataset=samples(), data_collator=padded)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    logged = [(one["loss"], one["grad_norm"]) for one in trainer.state.log_history if "loss" in one]
    return logged, trainer.evaluate()["eval_loss"]


def alike(ours: tuple[list[Any], float], theirs: tuple[list[Any], float]) -> None:
    assert len(ours[0]) == len(theirs[0]) == 8
    for our_step, their_step in zip(ours[0], theirs[0], strict=True):
        assert our_step == pytest.approx(their_step, rel=1e-3)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-3)


def test_a_run_is_that_of_the_stock_trainer_and_can_be_resumed(ranks, tmp_path) -> None:
    theirs = ranks(2).run(train, False, tmp_path / "ddp")[0]
    ours = ranks(2).run(train, True, tmp_path / "odc")[0]
    alike(ours, theirs)
    resumed = ranks(2).run(train, True, tmp_path / "rest", str(tmp_path / "odc" / "checkpoint-3"))[0]
    alike(resumed, theirs)

    from transformers import AutoConfig, AutoModelForCausalLM

    assert AutoConfig.from_pretrained(tmp_path / "odc").architectures == ["Qwen2ForCausalLM"]
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "odc").state_dict()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "ddp").state_dict()
    for name, weight in stock.items():
        torch.testing.assert_close(whole[name], weight, rtol=1e-2, atol=1e-3)
