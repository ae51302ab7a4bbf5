"""Under `torchrun`, which ends all ranks of a host when one has ended, they come back from what the keeper holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import recovering
from support.recovering import run, unequal

from odc.recovery import keeper
from odc.worker import Job, in_background

RANKS = 2


def under_torchrun(*program: object) -> None:
    """Gloo connects lazily, or it finds addresses of the ranks before in the store, and needs further restarts."""
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 3 --monitor-interval 0.1"
    ended = subprocess.run(
        [sys.executable, *launcher.split(), *map(str, program)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_GLOO_LAZY_INIT": "1",
            "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
        },
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]


@pytest.mark.thorough
def test_ranks_without_recovery_are_not_ended_by_what_ended_those_before(tmp_path: Path) -> None:
    """The store of a restarted job still holds why the ranks before have ended, and where they listened."""
    under_torchrun("-m", "bench.recovery_job", tmp_path, 4, "checkpoints", 2)
    assert {"killed.2", "0.jsonl", "1.jsonl"} == {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("script", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_ranks_come_back_under_torchrun(script: bool, tmp_path: Path) -> None:
    """Also those of a script that ends with each."""
    for name in ("deaths", "output"):
        (tmp_path / name).mkdir()
    deaths = ["1.2.clip", "0.4.keep"]
    program = [recovering.__file__]
    if script:
        file = tmp_path / "run.sh"
        file.write_text(f'#!/bin/bash\n"{sys.executable}" "$@"\nexit $?\n')
        file.chmod(0o755)
        program = ["--no-python", str(file), recovering.__file__]
    under_torchrun(*program, tmp_path / "deaths", tmp_path / "output", *deaths)
    assert {path.name for path in (tmp_path / "deaths").iterdir()} == set(deaths)
    found = [torch.load(tmp_path / "output" / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    assert len(found[0]["held"]) == 4, "the last process of rank 0 did steps 4 to 7 only"
    assert not unequal(found, run(tmp_path / "undisturbed", RANKS))


def test_a_script_that_torchrun_has_started_is_not_the_launcher() -> None:
    program = f"import runpy; print(runpy.run_path({keeper.__file__!r})['find_launcher']())"
    found = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "$1"; exit $?', "bash", program],
        env=os.environ | {"TORCHELASTIC_RUN_ID": "job"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(found.stdout) == os.getpid()


def test_a_keeper_whose_ranks_have_gone_may_wait_for_any_time() -> None:
    """As with Recovery(rejoin_s=...) of a year; a poll takes at most 24 days."""
    with subprocess.Popen(["sleep", "60"]) as launcher:
        kept = Job(lambda: keeper.keep(3e7, launcher.pid, []))
        in_background("keeper", kept.run)
        assert not kept.over(0.3)
        launcher.kill()
        kept.wait()
