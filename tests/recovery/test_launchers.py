"""The launchers of docs/launchers.md: their commands, as they stand there, run here a job that loses a rank.

Slurm and Kubernetes are what they set in the environment: `srun` is a script that does, a pod its container's command.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support import recovering
from support.ports import free_ports
from support.recovering import run, unequal

RANKS = 2
DEATH = "0.4.clip"
PAGE = (Path(__file__).parents[2] / "docs" / "launchers.md").read_text(encoding="utf-8")
#: What Slurm sets for its tasks; --kill-on-bad-exit=0 is given.
SRUN = """#!/bin/bash
test "$1" = --kill-on-bad-exit=0 || exit 2
shift
export SLURM_NTASKS=2 SLURM_NNODES=1
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks+=($!); done
for one in ${tasks[@]}; do wait $one || failed=1; done
exit $failed
"""


def recipe(heading: str, language: str) -> str:
    """The first block of code under a heading; its port is free here."""
    text = PAGE.split(f"\n## {heading}\n")[1]
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found, heading
    return found[1].replace("29500", str(free_ports(1)[0]))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("undisturbed"), RANKS)


class Host:
    """A folder in which the recipes' `python` and `train.py` are those of the tests, and `srun` is there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._started = folder, list[subprocess.Popen[str]]()
        for name in ("deaths", "output", "bin"):
            (folder / name).mkdir()
        given = [recovering.__file__, str(folder / "deaths"), str(folder / "output"), DEATH]
        (folder / "train.py").write_text(
            f"import runpy, sys\nsys.argv = {given}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
        )
        for name, text in {"python": f'#!/bin/bash\nexec {sys.executable} "$@"\n', "srun": SRUN}.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

    def start(self, command: str, **variables: str) -> subprocess.Popen[str]:
        """Give a command to bash."""
        environment = {**os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path), **variables}
        started = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(started)
        return started

    def close(self) -> None:
        """End whatever of it still runs."""
        for one in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.communicate()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


def ended_well(launcher: subprocess.Popen[str]) -> None:
    errors = launcher.communicate(timeout=800)[1]
    assert launcher.returncode == 0, errors[-4000:]


def survived(folder: Path, undisturbed: Any) -> None:
    assert {path.name for path in (folder / "deaths").iterdir()} == {DEATH}
    found = [torch.load(folder / "output" / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    assert not unequal(found, undisturbed)


@pytest.mark.parametrize("heading", ["A loop of the shell", pytest.param("Slurm", marks=pytest.mark.thorough)])
def test_a_batch_script_starts_ranks_again(heading: str, host: Host, undisturbed: Any) -> None:
    ended_well(host.start(recipe(heading, "bash")))
    survived(host.folder, undisturbed)


@pytest.mark.thorough
def test_pods_start_ranks_again(host: Host, undisturbed: Any) -> None:
    spec = yaml.safe_load(recipe("Kubernetes", "yaml"))["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    variables: Mapping[str, str] = {one["name"]: one["value"] for one in container["env"]}
    hosts = spec["completions"]
    assert int(variables["WORLD_SIZE"]) == hosts * int(variables["LOCAL_WORLD_SIZE"]) and hosts == spec["parallelism"]
    assert container["command"] == ["bash", "-c"]
    store = recipe("Kubernetes", "bash").partition(" -- ")[2].strip()
    host.start("exec " + re.sub("[0-9]+$", variables["MASTER_PORT"], store))
    here = {**variables, "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": "1"}
    pods = [host.start(container["args"][0], **here, JOB_COMPLETION_INDEX=str(i)) for i in range(RANKS)]
    for pod in pods:
        ended_well(pod)
    survived(host.folder, undisturbed)
