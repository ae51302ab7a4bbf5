"""The trace stands on the ground: the standard library and odc.errors; what draws is imported when it draws."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import odc.trace

FILES = sorted(Path(odc.trace.__file__).parent.glob("*.py"))


def imports(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_imports_nothing_above_it():
    assert len(FILES) > 5
    for path in FILES:
        for name in imports(ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
            root = name.split(".")[0]
            allowed = name.startswith(("odc.trace", "odc.errors")) or root in {*sys.stdlib_module_names, "matplotlib"}
            assert allowed, f"{path.name} imports {name}"


def test_optional_libraries_are_not_imported_with_the_module():
    for path in FILES:
        for name in imports(ast.parse(path.read_text(encoding="utf-8")).body):
            assert name.split(".")[0] != "matplotlib", f"{path.name} imports {name} at import"
