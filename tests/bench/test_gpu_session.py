"""bench/gpu_session.sh without a GPU: its steps run, and what they measure stands in files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_session.sh"


def session(step: str, results: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "REHEARSE": "1", "RESULTS": str(results), "PYTHON": python}
    return subprocess.run([str(SCRIPT), step], env=environment, capture_output=True, text=True, check=False)


def test_another_step_than_the_four_is_refused(tmp_path: Path) -> None:
    done = session("5", tmp_path)
    assert done.returncode == 2 and "there is no step 5" in done.stderr


@pytest.mark.parametrize("installed", [True, False])
def test_a_model_is_trained_where_transformers_is_installed(tmp_path: Path, installed: bool) -> None:
    """Of a Python that finds no package, or a stand-in of that name; what it would run is noted."""
    (tmp_path / "packages" / "transformers").mkdir(parents=True)
    python, asked = tmp_path / "python", tmp_path / "asked.txt"
    path = tmp_path / "packages" if installed else ""
    find = f"PYTHONPATH={path} exec {sys.executable} -S -B"
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || {find} "$@"\necho "$@" >> {asked}\n')
    python.chmod(0o755)
    done = session("4", tmp_path, str(python))
    assert done.returncode == (0 if installed else 1), done.stdout + done.stderr
    assert ("bench.gpu_train" in asked.read_text()) == installed
    assert ("train: transformers is not installed" in done.stdout) != installed


@pytest.mark.thorough
def test_a_rehearsal_measures_every_part(tmp_path: Path) -> None:
    done = session("3", tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    for part in ("beside", "kernels"):
        found = json.loads((tmp_path / f"rehearsal_{part}.json").read_text())
        assert found["rows"] and found["commit"], part
    assert len((tmp_path / "summary.txt").read_text().splitlines()) == 2
