"""bench/gpu_session.sh without a GPU: its steps run, and what they measure stands in files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_session.sh"


def session(step: str, results: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "REHEARSE": "1", "RESULTS": str(results), "PYTHON": sys.executable}
    return subprocess.run([str(SCRIPT), step], env=environment, capture_output=True, text=True, check=False)


def test_another_step_than_the_four_is_refused(tmp_path: Path) -> None:
    done = session("5", tmp_path)
    assert done.returncode == 2 and "there is no step 5" in done.stderr


@pytest.mark.thorough
def test_a_rehearsal_measures_every_part(tmp_path: Path) -> None:
    done = session("3", tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    for part in ("beside", "kernels"):
        found = json.loads((tmp_path / f"rehearsal_{part}.json").read_text())
        assert found["rows"] and found["commit"], part
    assert len((tmp_path / "summary.txt").read_text().splitlines()) == 2
