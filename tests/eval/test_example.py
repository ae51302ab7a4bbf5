"""examples/evaluate.py runs as a user starts it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'odc-fsdp[train]'")
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.thorough
def test_the_example_runs() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*launch, str(ROOT / "examples" / "evaluate.py")], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    scores, lengths = ast.literal_eval(done.stdout)
    assert len(scores) == 5 and all(-6 < score < -3 for score in scores)  # random weights: about -log(100)
    assert lengths == {"length": [(0, 90), (1, 10), (2, 20), (3, 30), (4, 15)]}
