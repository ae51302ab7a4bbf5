"""The benchmarks that need verl, at the smallest sizes: what they store, not how long it took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.verl import needs_verl

pytestmark = needs_verl
ROOT = Path(__file__).parents[3]


def run(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def stored(name: str, folder: Path, *words: str) -> dict[str, Any]:
    done = run(f"bench.{name}", *words, "--results", str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return found


def test_every_way_of_weight_sync_brings_the_same_weights(tmp_path: Path) -> None:
    sizes = ["--layers", "2", "--hidden", "64", "--words", "512", "--bucket", "1", "--rounds", "1"]
    result = stored("weight_sync", tmp_path, *sizes)
    assert {row["way"] for row in result["rows"]} == {
        "memcpy",
        "odc, read",
        "odc, publish and read",
        "odc, verl's checkpoint engine",
        "verl, gather and bucket",
    }
    parameters = 2 * 512 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 64 + 3 * 64 + 2 * 64 + 3 * 64 * 256) + 64
    assert result["MB"] == pytest.approx(2e-6 * parameters)
    seconds = [row["seconds"] for row in result["rows"]]
    assert seconds == sorted(seconds)


def test_all_arms_take_a_step_of_verls_update(tmp_path: Path) -> None:
    words = ["--rows", "4", "--minibatches", "2", "1", "--steps", "1", "--seconds", "0.02"]
    result = stored("verl_step", tmp_path, *words)
    assert [row["minibatches a step"] for row in result["rows"]] == [2] * 4 + [1] * 4
    for row in result["rows"]:
        counts = row["microbatches of the first step"].split("/")
        assert len(counts) == 4 and min(map(int, counts)) >= row["minibatches a step"]
        assert len(set(counts)) == 1 or row["arm"].startswith("odc"), "verl's ranks run equally many"
    assert result["control"].keys() == {"fsdp2", "odc"}


@pytest.mark.parametrize(
    ("name", "words", "why"),
    [
        ("weight_sync", ["--hidden", "65"], "--hidden must be a multiple of 64"),
        ("weight_sync", ["--bucket", "1"], "the largest parameter has 125 MiB in fp32"),
        ("verl_step", ["--minibatches", "3"], "--minibatches 3 does not divide --rows 32"),
        ("verl_step", ["--cap", "8000"], "must hold the longest row, 8448 tokens"),
    ],
)
def test_what_is_refused(name: str, words: list[str], why: str) -> None:
    done = run(f"bench.{name}", *words)
    assert done.returncode == 2 and why in done.stderr
