"""Scripts of this folder that run in a process of their own, in which triton interprets nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run_uninterpreted(script: str, folder: Path, **variables: str | None) -> tuple[Any, str]:
    """What a script printed, as JSON, and its standard error. It ends the test with the latter if it fails.

    Triton's cache is in `folder`; `variables` are set for it, or removed where they are None.
    """
    pytest.importorskip("triton", reason="needs triton: pip install 'odc-fsdp[kernels]'")
    wanted = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = os.environ | wanted | variables
    done = subprocess.run(
        [sys.executable, "-W", "error", str(Path(__file__).with_name(script))],
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout), done.stderr
