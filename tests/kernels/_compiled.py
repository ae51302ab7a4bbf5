"""Every kernel compiled for one target or several, in processes of their own, while other tests run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

Facts = dict[str, dict[str, Any]]
_under_way: dict[int, Future[Facts]] = {}


def begin(targets: Collection[int]) -> None:
    """Start compiling for these targets."""
    if targets:
        pool = ThreadPoolExecutor(len(targets))
        _under_way.update({target: pool.submit(_compile, target) for target in targets})
        pool.shutdown(wait=False)


def facts(target: int) -> Facts:
    """What was compiled for a target, by kernel; "no_library" says why nothing was linked. Waits for it."""
    return _under_way[target].result()


def _compile(target: int) -> Facts:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:  # compiled here and now, not found
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("_compile.py")), str(target)],
            env={**environment, "TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line.get("kernel", "no_library"): line for line in lines}
