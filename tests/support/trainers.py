"""Small runs of Hugging Face's Trainers on the ranks of a pool: a model of some thousand parameters, skewed samples."""

from __future__ import annotations

import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

#: (loss, gradient norm) of each logged step.
Logged = list[tuple[float, float]]


def as_torchrun(rank: int, world: int) -> None:
    """Say to accelerate what torchrun would; the process group of the pool is there already.

    What an Accelerator of an earlier test left, here or in the environment, is forgotten.
    """
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    os.environ |= {name: str(value) for name, value in environment.items()}
    warnings.simplefilter("ignore")  # a pool rank is left as it is; none of these are ours


def samples(lengths: list[int] | None = None) -> list[dict[str, list[int]]]:
    draw = random.Random(0)
    lengths = lengths or [min(60, int(draw.lognormvariate(2.5, 1)) + 2) for _ in range(32)]
    return [{"input_ids": [(start + i * i) % 60 for i in range(length)]} for start, length in enumerate(lengths)]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[i, : len(row["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def model(vocab: int = 60) -> Any:
    """The same on every call; embedding and head are two weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocab, tie_word_embeddings=False, **sizes, **heads))


def mixture(vocab: int = 60, **changes: Any) -> Any:
    """A mixture of four experts, which adds its router loss; the same on every call."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    router: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
    return MixtralForCausalLM(MixtralConfig(vocab_size=vocab, **(sizes | router | changes)))


def arguments(folder: Path, kind: Any = None, **changes: Any) -> Any:
    """`TrainingArguments`, or those of `kind`, of three steps of two microbatches."""
    from transformers import TrainingArguments

    fields: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,  # with less, gradients that are zero but for rounding would become steps
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return (kind or TrainingArguments)(**(fields | changes))


def stepped(
    folder: Path,
    changes: dict[str, Any],
    rows: Any,
    *,
    collate: Any = padded,
    resume: str | None = None,
    **options: Any,
) -> tuple[Logged, list[int]]:
    """Logged steps of an `OdcTrainer` on the rows, and how many forwards with gradients this rank ran in each step."""
    from transformers import TrainerCallback

    from odc.integrations.transformers import OdcTrainer

    class Steps(TrainerCallback):
        def on_step_end(self, *unused: Any, **given: Any) -> None:
            counts.append(0)

    given = {"model": model(), "args": arguments(folder, **changes), "train_dataset": rows, "data_collator": collate}
    trainer, counts = OdcTrainer(**given, callbacks=[Steps()], **options), [0]

    def count(module: torch.nn.Module, *unused: Any) -> None:
        counts[-1] += torch.is_grad_enabled()  # the check of the first loss has no gradients

    trainer.model.register_forward_pre_hook(count)
    trainer.train(resume_from_checkpoint=resume)
    return logged(trainer), counts[:-1]


def logged(trainer: Any) -> Logged:
    return [(one["loss"], one["grad_norm"]) for one in trainer.state.log_history if "loss" in one]


def differences(ours: Logged, theirs: Logged) -> tuple[float, float]:
    """The largest relative difference of a loss, and of a gradient norm."""
    assert len(ours) == len(theirs) > 0, (ours, theirs)
    pairs = list(zip(ours, theirs, strict=True))
    return max(abs(a[0] / b[0] - 1) for a, b in pairs), max(abs(a[1] / b[1] - 1) for a, b in pairs)
