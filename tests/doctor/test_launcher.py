"""The line of `odc doctor` about the launcher: srun's tasks, a batch script, devices that cgroups hide."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from odc.doctor import State, all_checks, examine
from odc.doctor.examination import Missing
from odc.doctor.launcher import hidden_devices, launcher

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
    """Where a host has its eight devices, and other files of the driver."""
    for name in (*(f"nvidia{number}" for number in range(8)), "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


def test_a_task_of_srun() -> None:
    assert launcher(TASK) == "srun: 4 processes on 2 hosts, rank 1; nothing missing"
    assert launcher({}) == "none: odc train starts its own ranks"


def test_what_is_missing_is_the_line() -> None:
    with pytest.raises(Missing, match="SLURM_NTASKS=4 without srun: this is the batch script's own process; put srun"):
        launcher({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"})


@pytest.mark.parametrize(
    ("opened", "allocated", "hidden"),
    [
        (8, "8", ""),
        (1, "8", "a rank may open 1 of 8 GPUs, and cannot map its peers' memory: srun --gpus-per-node or"),
        (4, "4", ""),  # the others belong to other jobs
        (1, "1", ""),  # ranks share it
        (1, "", "a rank may open 1 of 2 GPUs, and"),  # of two ranks
        (2, "", ""),
    ],
)
def test_devices_that_cgroups_hide(opened: int, allocated: str, hidden: str, gpus: Path) -> None:
    found = hidden_devices(TASK | {"SLURM_GPUS_ON_NODE": allocated}, 2, gpus, lambda path: int(path.name[6:]) >= opened)
    assert found.startswith(hidden) and bool(found) == bool(hidden)


def test_devices_are_opened(gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES hides none; a cgroup answers EPERM, and its line names the remedy."""
    assert not hidden_devices(TASK | {"CUDA_VISIBLE_DEVICES": "1"}, 2, gpus)
    real = os.open

    def refuse(path: Any, *flags: Any, **more: Any) -> int:
        if str(path).startswith(str(gpus)) and not str(path).endswith("nvidia1"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return real(path, *flags, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert hidden_devices({}, 2, gpus).endswith("1 of 2 GPUs, and cannot map its peers' memory: let each rank open all")
    monkeypatch.setattr(hidden_devices, "__defaults__", (gpus, None))
    with pytest.raises(Missing, match=r"4 processes on 2 hosts, rank 1; a rank may open 1 of 2 GPUs, .*gpu-bind=none"):
        launcher(TASK)
    alone = {"SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert launcher(TASK | alone | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}).endswith("nothing missing"), "no local peer"


def test_it_is_a_line_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in TASK.items():
        monkeypatch.setenv(name, text)
    (found,) = examine([one for one in all_checks() if one.what == "launcher"])
    assert (found.state, found.use) == (State.OK, "launcher") and found.found.startswith("srun: 4 processes")
