"""The program of docs/evaluation.md runs as it stands there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'odc-fsdp[train]'")
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.thorough
def test_program_of_the_page_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    program = re.findall(r"<!-- tests/eval/test_page.py runs this program -->\n```python\n(.*?)```", text, re.DOTALL)
    assert len(program) == 1
    script = tmp_path / "score.py"
    ending = f'if scores is not None:\n    open("{tmp_path}/found", "w").write(repr((scores, lengths)))\n'
    script.write_text(program[0] + ending, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    scores, lengths = ast.literal_eval((tmp_path / "found").read_text())
    assert len(scores) == 5 and all(-6 < score < -3 for score in scores)  # random weights: about -log(100)
    assert lengths == {"length": [(0, 90), (1, 10), (2, 20), (3, 30), (4, 15)]}
