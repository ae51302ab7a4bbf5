"""TRL's DPOTrainer and GRPOTrainer on odc against the stock ones, on two CPU ranks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.trainers import arguments, as_torchrun, model

from odc.experiments.data.bpe import ByteTokenizer

pytestmark = pytest.mark.skipif(
    find_spec("trl") is None or find_spec("peft") is None, reason="needs trl and peft: make test-integrations"
)
Rows = list[dict[str, float]]  # what a trainer logged, by step
LORA = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}


def start(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """A model and a tokenizer in `folder`, from which TRL loads the reference; what every trainer is given."""
    as_torchrun(rank, world)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if rank == 0:
        ByteTokenizer().save(folder)
        model(ByteTokenizer.vocab_size).save_pretrained(folder)
    dist.barrier()
    return {
        "model": AutoModelForCausalLM.from_pretrained(folder),
        "processing_class": AutoTokenizer.from_pretrained(folder),
    }


def adapter(wanted: bool) -> dict[str, Any]:
    from peft import LoraConfig

    torch.manual_seed(0)  # of the adapter's weights
    return {"peft_config": LoraConfig(**LORA)} if wanted else {}


def logged(trainer: Any) -> Rows:
    return [row for row in trainer.state.log_history if "loss" in row]


def apart(ours: Rows, theirs: Rows, names: tuple[str, ...]) -> float:
    """The largest difference of any of the logged `names`, against the larger of 1 and its size."""
    assert len(ours) == len(theirs) > 0, (ours, theirs)
    both = list(zip(ours, theirs, strict=True))
    assert all(a.keys() == b.keys() for a, b in both) and set(names) <= theirs[0].keys(), (ours, theirs)
    pairs = [(a[name], b[name]) for a, b in both for name in names if name in b]
    assert any(b for _, b in pairs), theirs
    return max(abs(a - b) / max(1, abs(b)) for a, b in pairs)


def prefer(rank: int, world: int, ours: bool, folder: Path, changes: dict[str, Any], lora: bool) -> tuple[Rows, bool]:
    """Logged steps of DPO, and whether the reference is sharded."""
    given = start(rank, world, folder / "model")
    from datasets import Dataset
    from torch.distributed.tensor import DTensor
    from trl import DPOConfig, DPOTrainer

    from odc.integrations.transformers import OdcTrainer

    class OdcDPOTrainer(OdcTrainer, DPOTrainer): ...

    texts = ["a", "on", "two", "four", "seven words and a few more", "nothing", "x" * 40, "end"] * 2
    rows = [{"prompt": f"{i}: ", "chosen": text, "rejected": text[::-1] + "!"} for i, text in enumerate(texts)]
    trainer = (OdcDPOTrainer if ours else DPOTrainer)(
        args=arguments(folder / str(ours), DPOConfig, max_grad_norm=1.0, **changes),
        train_dataset=Dataset.from_list(rows),
        **given,
        **adapter(lora),
    )
    reference = next((trainer.ref_model or trainer.model).parameters())
    trainer.train()
    return logged(trainer), isinstance(reference, DTensor)


FP32 = {"bf16": False}
DPO = ("loss", "grad_norm", "rewards/margins", "rewards/accuracies", "logps/chosen")


@pytest.mark.parametrize(("changes", "lora"), [(FP32, False), ({"bf16": True}, False), (FP32, True)])
def test_dpo_is_that_of_the_stock_trainer(ranks, tmp_path, changes: dict[str, Any], lora: bool) -> None:
    theirs, _ = ranks(2).run(prefer, False, tmp_path, changes, lora, timeout=500)[0]
    ours, sharded = ranks(2).run(prefer, True, tmp_path, changes, lora, timeout=500)[0]
    assert sharded
    assert apart(ours, theirs, DPO[:1]) < (1e-3 if changes == FP32 else 1e-2), (ours, theirs)
    assert apart(ours, theirs, DPO) < (1e-3 if changes == FP32 else 6e-2), (ours, theirs)


def given_completions(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """In place of generation, whose sampled tokens differ where logits differ in bf16's last bits."""
    draw = torch.Generator().manual_seed(trainer.state.global_step)
    completions = [torch.randint(0, 250, (3 + i,), generator=draw).tolist() for i in range(len(prompts))]
    return {"prompt_ids": [[*text.encode()] for text in prompts], "completion_ids": completions, "logprobs": None}


def grow(rank: int, world: int, ours: bool, folder: Path, changes: dict[str, Any], lora: bool) -> Rows:
    """Logged steps of GRPO; in bf16 completions are given, else generated."""
    given = start(rank, world, folder / "model")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from odc.integrations.transformers import OdcTrainer

    class OdcGRPOTrainer(OdcTrainer, GRPOTrainer): ...

    def reward(completion_ids: list[list[int]], **unused: Any) -> list[float]:
        return [sum(token % 2 for token in ids) / len(ids) - 0.01 * len(ids) for ids in completion_ids]

    changes = {"num_generations": 2, "max_completion_length": 8, "beta": 0.1, "num_iterations": 2} | changes
    trainer = (OdcGRPOTrainer if ours else GRPOTrainer)(
        args=arguments(folder / str(ours), GRPOConfig, max_grad_norm=1.0, **changes),
        train_dataset=Dataset.from_list([{"prompt": f"{i}: " * (i % 3 + 1)} for i in range(16)]),
        reward_funcs=reward,
        rollout_func=given_completions if changes["bf16"] else None,
        **given,
        **adapter(lora),
    )
    trainer.train()
    return logged(trainer)


GRPO = ("loss", "grad_norm", "kl", "reward", "completions/mean_length")


@pytest.mark.parametrize(("changes", "lora"), [(FP32, False), ({"bf16": True}, False), (FP32, True)])
def test_grpo_is_that_of_the_stock_trainer(ranks, tmp_path, changes: dict[str, Any], lora: bool) -> None:
    theirs = ranks(2).run(grow, False, tmp_path, changes, lora, timeout=500)[0]
    ours = ranks(2).run(grow, True, tmp_path, changes, lora, timeout=500)[0]
    assert apart(ours, theirs, GRPO[:1]) < 1e-3, (ours, theirs)
    assert apart(ours, theirs, GRPO) < (1e-3 if changes == FP32 else 3e-2), (ours, theirs)


def refused(rank: int, world: int, folder: Path) -> list[str]:
    """The errors of DPO and GRPO for `max_tokens`."""
    given = start(rank, world, folder / "model")
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

    from odc.errors import ConfigError
    from odc.integrations.transformers import OdcTrainer

    class OdcDPOTrainer(OdcTrainer, DPOTrainer): ...

    class OdcGRPOTrainer(OdcTrainer, GRPOTrainer): ...

    one = FP32 | {"gradient_accumulation_steps": 1}
    pairs = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4)
    reward = {"reward_funcs": lambda completions, **unused: [0.0] * len(completions)}
    found = []
    for kind, config, options in ((OdcDPOTrainer, DPOConfig, {}), (OdcGRPOTrainer, GRPOConfig, reward)):
        changes = one | ({"num_generations": 2} if options else {})
        with pytest.raises(ConfigError) as refusal:
            kind(args=arguments(folder, config, **changes), train_dataset=pairs, max_tokens=64, **given, **options)
        found.append(str(refusal.value))
    return found


def test_losses_that_are_means_of_a_microbatch_refuse_unequal_ones(ranks, tmp_path) -> None:
    for kind, message in zip(("DPO", "GRPO"), ranks(2).run(refused, tmp_path, timeout=500)[0], strict=True):
        assert f"max_tokens=64 with the loss of Odc{kind}Trainer" in message, message
