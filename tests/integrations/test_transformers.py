"""A small run of Hugging Face's Trainer over odc on 2 ranks, against the same run in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from _ranks import RankPool, RanksFailed

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate: make test-integrations")

STEPS, SAMPLES = 4, 32


def build(lengths_differ: bool = True) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """A Qwen2 of a few thousand parameters, and samples of 3 to 24 tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, max_position_embeddings=64, attn_implementation="sdpa",
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(SAMPLES):
        length = int(torch.randint(3, 25, (), generator=generator)) if lengths_differ else 12
        ids = torch.randint(64, (length,), generator=generator)
        samples.append({"input_ids": ids, "labels": ids.clone()})
    return model, samples


def trainer(folder: str, base: tuple[type, ...], batch: int, **changes: Any) -> Any:
    """A Trainer over them that steps over 8 samples at a time, in order."""
    import transformers
    from torch.utils.data import SequentialSampler

    class Ordered(*base, transformers.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    model, samples = build()
    arguments = {
        "output_dir": folder, "per_device_train_batch_size": batch, "gradient_accumulation_steps": 2,
        "max_steps": STEPS, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "optim": "adamw_torch",
        "adam_epsilon": 1e-4, "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return Ordered(
        model=model,
        args=transformers.TrainingArguments(**(arguments | changes)),
        train_dataset=samples,
        data_collator=pad,
    )


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pads = torch.nn.utils.rnn.pad_sequence
    ids = pads([s["input_ids"] for s in samples], batch_first=True)
    labels = pads([s["labels"] for s in samples], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


def history(done: Any) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in done.state.log_history if "grad_norm" in row]


def run_over_odc(rank: int, world: int, folder: str, changes: dict[str, Any]) -> list[tuple[float, float]]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from odc.fsdp import shutdown
    from odc.integrations.transformers import OdcTrainer

    try:
        made = trainer(folder, (OdcTrainer,), 2, **changes)
        made.train()
        assert isinstance(made.model, torch.distributed.fsdp.FSDPModule), "not sharded"
        made.save_model(folder)
        return history(made)
    finally:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state() if hasattr(state, "_reset_state") else state._shared_state.clear()
        shutdown()


def test_two_ranks_train_as_one_process_does(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    alone = trainer(str(tmp_path / "alone"), (), 4)
    alone.train()
    expected, found = history(alone), ranks(2).run(run_over_odc, str(tmp_path / "odc"), {})
    assert len(expected) == STEPS
    for own in found:
        assert own == [(pytest.approx(loss, rel=1e-4), pytest.approx(norm, rel=1e-4)) for loss, norm in expected]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "odc").state_dict()
    for name, tensor in alone.model.state_dict().items():
        assert torch.allclose(saved[name], tensor, atol=1e-5), name


def test_bf16_trains(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    for own in ranks(2).run(run_over_odc, str(tmp_path), {"bf16": True, "max_steps": 2}):
        assert len(own) == 2 and all(loss < 10 for loss, _ in own)


@pytest.mark.parametrize(("changes", "says"), [
    ({"save_strategy": "steps"}, "save_only_model=True"),
    ({"resume_from_checkpoint": "there"}, "holds the model only"),
])  # fmt: skip
def test_what_it_refuses(ranks: Callable[[int], RankPool], tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RanksFailed, match=says):
        ranks(2).run(run_over_odc, str(tmp_path), changes)
