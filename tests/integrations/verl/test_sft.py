"""verl's stock SFT trainer with strategy odc against fsdp2, on two CPU ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _verl import fit, needs_verl, save_chats, save_tiny_model, sft_changes

pytestmark = needs_verl

ODC = {"engine.strategy": "odc", "engine._target_": "odc.integrations.verl.config.OdcEngineConfig"}
FSDP2 = {"engine.strategy": "fsdp2"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("sft")
    save_tiny_model(folder / "model")
    save_chats(folder / "train.parquet", samples=32)
    return folder / "model", folder / "train.parquet"


def curve(logged: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(one["train/loss"], one["train/grad_norm"]) for one in logged if "train/loss" in one]


def test_the_loss_curve_is_that_of_fsdp2(ranks, inputs, tmp_path) -> None:
    theirs = ranks(2).run(fit, FSDP2, *inputs, tmp_path / "fsdp2", timeout=280)[0]
    ours = ranks(2).run(fit, ODC, *inputs, tmp_path / "odc", timeout=280)[0]
    assert len(curve(ours)) == 8
    for ours_at, theirs_at in zip(curve(ours), curve(theirs), strict=True):
        assert ours_at == pytest.approx(theirs_at, rel=1e-4)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(ranks, inputs, tmp_path) -> None:
    whole = ranks(2).run(fit, ODC | {"trainer.save_freq": 3}, *inputs, tmp_path / "whole", timeout=280)[0]
    resume = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": tmp_path / "whole" / "global_step_3"}
    rest = ranks(2).run(fit, ODC | resume, *inputs, tmp_path / "rest", timeout=280)[0]
    assert [one["step"] for one in rest] == [4, 5, 6, 7, 8]
    for resumed, once in zip(curve(rest), curve(whole)[3:], strict=True):
        assert resumed == pytest.approx(once, rel=1e-4)


def test_as_the_documentation_says(inputs, tmp_path) -> None:
    """By torchrun and on the command line, with a budget at which ranks run different numbers of microbatches."""
    model, data = inputs
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-addr", "127.0.0.1"]
    command += ["-m", "odc.integrations.verl.sft_on_cpu", f"hydra.run.dir={tmp_path}"]
    changes = ODC | {
        "+engine.odc.rebalance": False,
        "trainer.total_training_steps": 2,
        "data.max_token_len_per_gpu": 110,
    }
    command += [f"{key}={value}" for key, value in sft_changes(model, data, tmp_path, changes).items()]
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step:2 - " in done.stdout, done.stdout[-3000:]
    assert (tmp_path / "global_step_2").is_dir()
