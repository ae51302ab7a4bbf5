"""`odc grpo`, `odc compare-grpo` and the example as a user starts them, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs the cli extra")
pytest.importorskip("transformers", reason="needs the train extra")

ROOT = Path(__file__).resolve().parents[2]
_ENV = {
    **os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)
}  # fmt: skip


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, env=_ENV, check=False)


@pytest.mark.thorough
def test_grpo_launches_its_ranks_and_a_rollout(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    done = python("odc.cli", "grpo", "--steps", "1", "--prompts", "2", "--response-tokens", "8", "--output", str(log))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("odc grpo: odc, 2 ranks, 1 steps\nodc grpo: step 1 of 1: reward 0."), done.stderr
    assert re.match(r"step 1: reward 0\.\d+ -> 0\.\d+, response ", done.stdout)
    (record,) = (json.loads(line) for line in log.read_text().splitlines())
    assert record["step"] == 1 and record["version"] == 2


@pytest.mark.thorough
def test_a_comparison_and_what_it_writes(tmp_path: Path) -> None:
    options = ["--steps", "2", "--prompts", "2", "--response-tokens", "8", "--arms", "fsdp2,odc/verl"]
    done = python("odc.cli", "compare-grpo", *options, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"\n +fsdp2 +odc/verl", done.stdout) and re.search(r"final reward +0\.\d+ +0\.\d+", done.stdout)
    figures = json.loads((tmp_path / "compare-grpo.json").read_text())
    assert figures["arms"].keys() == {"fsdp2", "odc/verl"} and figures["command"][1] == "compare-grpo"
    assert all(0 <= arm["bubble"]["median"] < 1 for arm in figures["arms"].values())
    assert {"trace-fsdp2.json.gz", "trace-odc-verl.json.gz", "timeline.png"} <= {one.name for one in tmp_path.iterdir()}


@pytest.mark.thorough
def test_the_example() -> None:
    done = python(
        "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
        str(ROOT / "examples" / "grpo.py"), "--steps", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"step 1: reward 0\.\d+, .*\nstep 2: reward 0\.\d+, .*\n", done.stdout), done.stdout
