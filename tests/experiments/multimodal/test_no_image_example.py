"""examples/no_image.py ends under odc (`test_skipped_tower` says what FSDP2 does)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.thorough
def test_the_example_finishes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "no_image.py"), "odc"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    norms = re.findall(r"rank (\d): vision gradient ([\d.]+)", done.stdout)
    assert sorted(rank for rank, _ in norms) == ["0", "1"] and len({norm for _, norm in norms}) == 1
