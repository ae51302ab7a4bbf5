"""The balancers stand on the ground: the standard library, numpy, odc.errors, and each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import odc.balance


def imported(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_imports_only_the_standard_library_numpy_and_errors():
    files = sorted(Path(odc.balance.__file__).parent.glob("*.py"))
    assert len(files) > 5
    for path in files:
        for name in imported(path.read_text(encoding="utf-8")):
            known = {"numpy", *sys.stdlib_module_names}
            allowed = name.startswith(("odc.balance", "odc.errors")) or name.split(".")[0] in known
            assert allowed, f"{path.name} imports {name}"


def test_importing_the_balancers_loads_no_optional_library():
    program = (
        "import sys, odc.balance; heavy = {'torch', 'numba', 'scipy', 'matplotlib'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
