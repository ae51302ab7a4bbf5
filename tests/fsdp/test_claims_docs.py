"""The program of docs/balance.md runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_program_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "balance.md").read_text("utf-8")
    marked = r"<!-- tests/fsdp/test_claims_docs.py runs this program -->\n```python\n(.*?)```"
    (program,) = re.findall(marked, page, re.DOTALL)
    script = tmp_path / "loop.py"
    # A file a rank: what two ranks print may interleave.
    ending = f'open(f"{tmp_path}/rank-{{rank}}", "w").write(f"{{step}} {{int(total)}}")\n'
    script.write_text(program + ending, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["2 1180", "2 1180"]
