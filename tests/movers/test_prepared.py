"""Which thread compiles and loads kernels: the one that trains, before the others launch any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_no_thread_but_the_training_one_compiles_or_loads(tmp_path: Path) -> None:
    """By triton's own launches, with a stand-in for its driver; what is loaded was compiled first."""
    pytest.importorskip("triton", reason="needs triton: pip install 'odc-fsdp[kernels]'")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(Path(__file__).parents[1] / "support" / "prepared.py")],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["launched"] > 300, "the threads launched nothing"
    assert found["late"] == [], f"{len(found['late'])} kernels were loaded by other threads"
    assert found["early"] == 10 + 6, "five kernels a dtype; then four, and those of 2-byte words are there"
