"""The simulator needs no torch, and pictures and YAML only when asked for."""

from __future__ import annotations

import subprocess
import sys


def test_importing_it_imports_nothing_heavy() -> None:
    program = """
import sys
import odc.simulate, odc.simulate.study, odc.simulate.report
heavy = {"torch", "matplotlib", "yaml", "rich", "typer", "datasets"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
