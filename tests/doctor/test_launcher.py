"""The line of `odc doctor` about the launcher: srun's tasks, a batch script, devices that cgroups hide."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from odc.doctor import State, all_checks, examine
from odc.doctor.examination import Missing
from odc.doctor.launcher import launcher

TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    """A host with eight devices, as its driver lists them."""
    for number in range(8):
        (tmp_path / f"0000:{number:02d}:00.0").mkdir()
    return tmp_path


def test_a_task_of_srun() -> None:
    assert launcher(TASK) == "srun: 4 processes on 2 hosts, rank 1; nothing missing"
    assert launcher({}) == "none: odc train starts its own ranks"


def test_what_is_missing_is_the_line() -> None:
    with pytest.raises(Missing, match="SLURM_NTASKS=4 without srun: this is the batch script's own process; put srun"):
        launcher({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"})


@pytest.mark.parametrize(("seen", "hidden"), [(0, False), (1, True), (2, False), (8, False)])
def test_devices_that_cgroups_hide(seen: int, hidden: bool, gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight, two of which the two tasks of a host need."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    if not hidden:
        assert launcher(TASK, gpus).endswith("nothing missing")
        return
    with pytest.raises(Missing) as raised:
        launcher(TASK, gpus)
    assert str(raised.value) == (
        "srun: 4 processes on 2 hosts, rank 1; a rank sees 1 of 8 devices, and cannot map its peers': "
        "srun --gpus-per-node or --gpu-bind=none, without --gpus-per-task"
    )


def test_one_rank_a_host_needs_no_other_device(gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    alone = TASK | {"SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert launcher(alone | {"SLURM_NODEID": "1"}, gpus).endswith("nothing missing")


def test_it_is_a_line_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in TASK.items():
        monkeypatch.setenv(name, text)
    (found,) = examine([one for one in all_checks() if one.what == "launcher"])
    assert (found.state, found.use) == (State.OK, "launcher") and found.found.startswith("srun: 4 processes")
