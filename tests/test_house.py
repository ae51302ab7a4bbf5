"""The rules of the house (docs/architecture.md): which way imports run, how long files grow, what importing does."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import odc

HOUSE = Path(odc.__file__).parent
FILES = {
    ".".join(path.relative_to(HOUSE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted([*HOUSE.rglob("*.py"), *(HOUSE / "kernels").glob("*.py")])  # a link: rglob does not follow it
}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}
TREES = {name: ast.parse(text) for name, text in TEXTS.items()}
GROUND = frozenset({"errors", "settings", "provenance"})  # every part may import these
ALL = frozenset(name.split(".")[1] for name in FILES if "." in name) - GROUND - {"integrations"}
TOOLS = frozenset({"bench", "cli", "doctor", "simulate"})  # nothing that trains may need them
MAY_IMPORT = {
    "errors": frozenset(),
    "settings": frozenset(),
    "provenance": frozenset(),
    "balance": frozenset(),
    "eval": frozenset({"runtime"}),
    "trace": frozenset(),
    "memory": frozenset(),
    "microbatch": frozenset({"trace"}),
    "kernels": frozenset(),
    "runtime": frozenset({"kernels", "memory", "trace"}),
    "fsdp": frozenset({"runtime", "memory", "trace"}),
    "handover": frozenset({"fsdp", "runtime", "memory"}),
    "dispatch": frozenset({"balance", "runtime", "memory", "trace"}),
    "split": frozenset({"balance", "dispatch", "runtime"}),
    "arms": frozenset({"balance"}),
    "simulate": frozenset({"arms", "balance", "trace"}),
    "bench": ALL - {"cli", "doctor", "simulate", "experiments"},
    "doctor": frozenset({"fsdp", "memory", "runtime"}),
    "experiments": ALL - TOOLS,
    "integrations": ALL - TOOLS - {"experiments"},
    "cli": ALL | {"integrations"},
    "odc": frozenset({"fsdp"}),
}


def part(name: str) -> str:
    """`odc.runtime.wait` is part of `runtime`; odc/__init__.py of `odc`."""
    return name.split(".")[1] if "." in name else "odc"


def imports(name: str) -> set[str]:
    """Modules of odc that one imports, anywhere in it; a name that an `__init__` re-exports counts as its package."""
    found: set[str] = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & FILES.keys()
            found |= inside or {node.module}
    return {one for one in found if one.split(".")[0] == "odc"}


def test_imports_run_downward() -> None:
    wrong = []
    for name in FILES:
        allowed = MAY_IMPORT[part(name)] | GROUND | {part(name)}
        wrong += [f"{name} imports {other}" for other in imports(name) if part(other) not in allowed]
    assert not wrong


def test_no_two_files_import_each_other() -> None:
    graph = {name: imports(name) & FILES.keys() - {name} for name in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("imports go round: " + " -> ".join(error.args[1]))


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Of a function; of a command of the command line, whose parameters are its options, what follows them."""
    first = node.body[0].lineno if len(node.args.args) > 10 else node.lineno
    return (node.end_lineno or node.lineno) - first + 1


def test_files_and_functions_stay_short() -> None:
    long = [f"{name} has {size} lines" for name, text in TEXTS.items() if (size := len(text.splitlines())) > 400]
    for name, tree in TREES.items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        long += [f"{name}.{node.name} has {lines(node)} lines" for node in functions if lines(node) > 60]
    assert not long


def re_exports(node: ast.stmt, *, lazily: bool) -> bool:
    """Whether a statement of an `__init__` only passes names on; `lazily` also by PEP 562."""
    if isinstance(node, ast.If):
        return lazily and all(re_exports(one, lazily=True) for one in [*node.body, *node.orelse])
    if isinstance(node, ast.FunctionDef):
        return lazily and node.name in {"__getattr__", "__dir__"}
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    return docstring or names or isinstance(node, ast.ImportFrom)


def test_packages_only_re_export() -> None:
    for name in [name for name, path in FILES.items() if path.name == "__init__.py"]:
        for node in TREES[name].body:
            assert re_exports(node, lazily=name == "odc"), f"{name}: {ast.unparse(node)}"
    assert len(odc.__all__) <= 12


def test_every_module_opens_with_a_docstring() -> None:
    assert not [name for name, tree in TREES.items() if not ast.get_docstring(tree)]


SEAMS = ("odc.fsdp._torch_compat:", "odc.memory._torch_symmetric:", "odc.split._torch_private:")


def test_private_torch_names_live_in_one_file_a_seam() -> None:
    wrong = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                paths = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                paths = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            wrong += [f"{name}: {path}" for path in paths if path.startswith("torch.") and "._" in path]
    assert wrong, "the search finds nothing at all"
    assert not [one for one in wrong if not one.startswith(SEAMS)]


def test_extras_that_messages_name_exist() -> None:
    project = tomllib.loads((HOUSE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {extra for text in TEXTS.values() for extra in re.findall(r"odc-fsdp\[([a-z-]+)\]", text)}
    assert named
    assert named <= project["optional-dependencies"].keys()


def test_importing_odc_starts_nothing_and_reads_no_environment() -> None:
    program = """
import os, sys, threading
import torch, torch.distributed.fsdp, torch.distributed.device_mesh  # these may do as they please

class Watched(dict):
    def __getitem__(self, key): raise AssertionError(f"read {key} of the environment")
    get = __contains__ = __getitem__

threads, descriptors = threading.active_count(), sorted(os.listdir("/proc/self/fd"))
os.environ._data = Watched(os.environ._data)
import odc
from odc import *
assert threading.active_count() == threads, "importing odc started a thread"
assert sorted(os.listdir("/proc/self/fd")) == descriptors, "importing odc left a file open"
heavy = {"typer", "rich", "matplotlib", "transformers", "tokenizers", "odc.kernels"} & set(sys.modules)
assert not heavy, f"importing odc imported {heavy}"
"""
    run(program)


def test_public_names_load_when_named() -> None:
    program = """
import sys
import odc, odc.balance, odc.errors, odc.settings, odc.trace
assert set(odc.__all__) <= set(dir(odc))
assert "torch" not in sys.modules, "importing odc imported torch"
from odc import *
assert fully_shard is odc.fully_shard is vars(odc)["fully_shard"]
assert "torch" in sys.modules
try:
    odc.nothing
except AttributeError as error:
    assert str(error) == "module 'odc' has no attribute 'nothing'"
else:
    raise AssertionError("odc has every name")
"""
    run(program)


def run(program: str) -> None:
    """Run a program in a fresh interpreter; it must end well."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
