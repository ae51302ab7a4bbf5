"""Kernels compiled for a target, in a process where nothing is interpreted."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

Facts = dict[str, dict[str, Any]]


def facts(target: int, which: Literal["first", "others"] = "first") -> Facts:
    """What was compiled for a target, by kernel; "no_library" says why nothing was linked. Waits for it, once.

    `which` is explained in `support.compile_kernels`.
    """
    return _compiled(target, which)


@functools.cache
def _compiled(target: int, which: str) -> Facts:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:  # compiled here and now, not found
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), str(target), which],
            env={**environment, "TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line.get("kernel", "no_library"): line for line in lines}
