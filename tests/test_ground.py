"""What the rooms for planning and tracing import; optional libraries only when these are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PLAN = """
from odc.dispatch.route import Route
from odc.dispatch import BalancePolicy, node_wise, post_balance
move = post_balance([[5, 9], [3]], BalancePolicy())
Route.of(move, {'rows': [5, 9, 3]}, 0)
node_wise(move, [5, 9, 3], 1)
"""


@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        ("import odc.balance", {"torch", "numba", "scipy", "matplotlib"}),
        ("import odc.simulate.report", {"torch", "numba", "matplotlib", "yaml", "rich", "typer", "datasets"}),
        ("import odc.trace", {"torch", "numpy", "matplotlib"}),
        (PLAN, {"torch", "numba", "scipy"}),
    ],
    ids=["balance", "simulate", "trace", "dispatch"],
)
def test_optional_libraries_are_imported_when_they_are_used(program: str, heavy: set[str]) -> None:
    program = f"import sys\n{program}\nassert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("room", "library"), [("balance", "numpy"), ("trace", "matplotlib")])
def test_a_room_imports_the_standard_library_one_other_and_the_errors(room: str, library: str) -> None:
    files = sorted((Path(__file__).parents[1] / "odc" / room).glob("*.py"))
    assert len(files) > 5
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                known = name.split(".")[0] in {library, *sys.stdlib_module_names}
                assert known or name.startswith((f"odc.{room}", "odc.compiled", "odc.errors")), (
                    f"{path.name} imports {name}"
                )
