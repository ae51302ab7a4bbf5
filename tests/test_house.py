"""The rules of the house (docs/architecture.md): which way imports run, how long files are, what importing does."""

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
GROUND = frozenset(
    {"compiled", "deadlines", "errors", "launchers", "saved_dataset", "settings", "provenance", "worker"}
)  # every room may import these
#: The rooms from the ground up. A room imports rooms of lower floors only.
FLOORS = (
    frozenset({"balance", "blocks", "model_copies", "kernels", "memory", "ranks", "trace"}),
    frozenset({"arms", "microbatch", "movers", "net"}),
    frozenset({"protocol"}),
    frozenset({"hosts"}),
    frozenset({"runtime"}),
    frozenset({"dispatch", "fsdp"}),
    frozenset({"eval", "handover", "recovery", "split"}),
    frozenset({"bench", "doctor", "experiments", "integrations", "simulate"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
WORK = frozenset().union(*FLOORS[:7])  # what trains, measures and evaluates; tools and adapters stand above it
MAY_IMPORT = {
    "balance": frozenset(),
    "kernels": frozenset(),
    "memory": frozenset(),
    "ranks": frozenset(),
    "trace": frozenset(),
    "arms": frozenset({"balance"}),
    "blocks": frozenset(),
    "model_copies": frozenset(),
    "microbatch": frozenset({"trace"}),
    "movers": frozenset({"kernels", "memory"}),
    "net": frozenset({"memory"}),
    "protocol": frozenset({"memory", "movers", "trace"}),
    "hosts": frozenset({"memory", "movers", "net", "protocol", "trace"}),
    "runtime": frozenset({"hosts", "memory", "net", "protocol", "trace"}),
    "dispatch": frozenset({"balance", "memory", "net", "protocol", "runtime", "trace"}),
    "eval": frozenset({"fsdp", "net", "runtime"}),
    "fsdp": frozenset({"memory", "movers", "net", "protocol", "runtime", "trace"}),
    "handover": frozenset({"fsdp", "memory", "movers", "net", "protocol", "runtime"}),
    "recovery": frozenset({"fsdp", "memory", "net", "ranks", "runtime", "trace"}),
    "split": frozenset({"balance", "fsdp", "net", "protocol", "runtime", "trace"}),
    "bench": WORK,
    "doctor": frozenset({"blocks", "fsdp", "memory", "movers", "net", "protocol", "runtime"}),
    "experiments": WORK,
    "integrations": WORK,
    "simulate": frozenset({"arms", "balance"}),
    "cli": WORK | FLOORS[7],
    "__main__": frozenset({"cli"}),
    "odc": frozenset({"fsdp", "recovery"}),  # odc/__init__.py
}


def part(name: str) -> str:
    """The room of a module: `odc.protocol.wait` is part of `runtime`, odc/__init__.py of `odc`."""
    return name.split(".")[1] if "." in name else "odc"


def imports(name: str) -> set[str]:
    """Modules of odc that a module imports, anywhere in it; a re-exported name counts as its package."""
    found: set[str] = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & FILES.keys()
            found |= inside or {node.module}
    return {one for one in found if one.split(".")[0] == "odc"}


def test_every_room_stands_on_a_floor() -> None:
    assert {part(name) for name in FILES} - GROUND - {"odc"} <= frozenset().union(*FLOORS)
    assert MAY_IMPORT.keys() - {"odc"} == frozenset().union(*FLOORS)


def test_arrows_between_rooms_run_down() -> None:
    for number, floor in enumerate(FLOORS):
        below = frozenset().union(*FLOORS[:number])
        assert not {f"{room} -> {other}" for room in floor for other in MAY_IMPORT[room] - below}


def test_imports_run_downward() -> None:
    wrong = []
    for name in FILES:
        allowed = (frozenset() if part(name) in GROUND else MAY_IMPORT[part(name)]) | GROUND | {part(name)}
        wrong += [f"{name} imports {other}" for other in imports(name) if part(other) not in allowed]
    assert not wrong


def test_no_two_files_import_each_other() -> None:
    graph = {name: imports(name) & FILES.keys() - {name} for name in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("imports go round: " + " -> ".join(error.args[1]))


#: The rooms of the communication, which are cut by what they know.
CORE = ("movers", "net", "protocol", "hosts", "runtime")


def test_few_arrows_run_between_the_rooms_of_the_communication() -> None:
    core = [(part(name), part(other)) for name in FILES for other in imports(name)]
    arrows = {(room, other) for room, other in core if room != other and {room, other} <= {*CORE}}
    assert len(arrows) <= 8, sorted(arrows)


@pytest.mark.parametrize("room", CORE)
def test_a_room_has_seven_floors_at_most(room: str) -> None:
    """A floor is one more file in the longest chain of imports between files of the room; an `__init__` is none."""
    graph = {name: imports(name) & FILES.keys() - {name} for name in FILES if part(name) == room}
    floors: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        below = [floors[other] for other in graph.get(name, ()) if part(other) == room]
        floors[name] = max(below, default=0) + (FILES[name].name != "__init__.py")
    assert max(floors.values()) <= 7, sorted((floor, name) for name, floor in floors.items() if part(name) == room)


def test_the_protocol_knows_no_socket_and_no_thread() -> None:
    wrong = []
    for name in [name for name in FILES if part(name) == "protocol"]:
        modules = {alias.name for node in ast.walk(TREES[name]) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module or "" for node in ast.walk(TREES[name]) if isinstance(node, ast.ImportFrom)}
        known = {module.partition(".")[0] for module in modules} & {"socket", "threading", "selectors"}
        wrong += [f"{name}: {module}" for module in known | (modules & {"odc.worker"})]
    assert not wrong


def is_callable(annotation: ast.expr | None) -> bool:
    return annotation is not None and "Callable[" in ast.unparse(annotation).split(" | ")[0]


def callable_attributes(owner: ast.ClassDef) -> set[str]:
    """Attributes that `__init__` declares as functions, or is given as functions."""
    found: set[str] = set()
    for method in [one for one in owner.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]:
        given = {one.arg for one in [*method.args.args, *method.args.kwonlyargs] if is_callable(one.annotation)}
        for node in ast.walk(method):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
                found |= {node.target.attr} if is_callable(node.annotation) else set()
            elif isinstance(node, ast.Assign):
                pairs = zip(*(getattr(one, "elts", [one]) for one in (node.targets[0], node.value)), strict=False)
                found |= {
                    target.attr
                    for target, value in pairs
                    if isinstance(target, ast.Attribute) and isinstance(value, ast.Name) and value.id in given
                }
    return found


def test_nothing_is_wired_from_outside() -> None:
    """A function that an object calls is given to its `__init__`, where one reads what calls what."""
    classes = [
        (name, node)
        for name in FILES
        if part(name) in CORE
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.ClassDef)
    ]
    functions = set[str]().union(*(callable_attributes(owner) for _, owner in classes))
    assert len(functions) > 10, "the search finds nothing at all"
    wrong = []
    for name in [name for name in FILES if part(name) in CORE]:
        for method in ast.walk(TREES[name]):
            if isinstance(method, ast.FunctionDef) and method.name != "__init__":
                for node in method.body:
                    targets = [one for line in ast.walk(node) if isinstance(line, ast.Assign) for one in line.targets]
                    attributes = [one for target in targets for one in ast.walk(target)]
                    wrong += [
                        f"{name}:{one.lineno} sets {one.attr}"
                        for one in attributes
                        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and one.attr in functions
                    ]
    assert not wrong


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function; of a function whose parameters are command-line options, the lines that follow them."""
    first = node.body[0].lineno if len(node.args.args) > 10 else node.lineno
    return (node.end_lineno or node.lineno) - first + 1


def test_files_and_functions_stay_short() -> None:
    long = [f"{name} has {size} lines" for name, text in TEXTS.items() if (size := len(text.splitlines())) > 400]
    for name, tree in TREES.items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        long += [f"{name}.{node.name} has {lines(node)} lines" for node in functions if lines(node) > 60]
    assert not long


TIMED = frozenset({"net", "protocol", "hosts", "runtime", "fsdp"})  # rooms whose times stand in odc/deadlines.py


def fixed_times(tree: ast.Module) -> list[int]:
    """Lines that name a time of their own, or wait for a number of seconds."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            found += [node.lineno] * any(re.fullmatch(r"_?[A-Z][A-Z_]*_S", name) for name in names)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = [*node.args, *(word.value for word in node.keywords if word.arg in {"timeout", "timeout_s"})]
            numbers = [one for one in given if isinstance(one, ast.Constant) and isinstance(one.value, int | float)]
            waits = called in {"Backoff", "Deadline", "JobStore", "join", "sleep", "wait", "within"}
            found += [node.lineno] * (waits and any(one.value for one in numbers))
    return found


def test_every_fixed_time_stands_in_one_table() -> None:
    assert len(fixed_times(TREES["odc.deadlines"])) > 20, "the search finds nothing at all"
    assert not [f"{name}:{at}" for name, tree in TREES.items() if part(name) in TIMED for at in fixed_times(tree)]


#: Loops over sockets. All other work in the background is a `Job` of a `Worker`.
THREADS = {"odc.worker", "odc.net.reactor", "odc.net.engines.server"}


def test_threads_are_made_in_few_places() -> None:
    assert {name for name, text in TEXTS.items() if "threading.Thread(" in text} == THREADS


def test_one_place_says_by_whom_a_job_was_aborted() -> None:
    assert [name for name, text in TEXTS.items() if "was aborted by rank" in text] == ["odc.errors"]


def re_exports(node: ast.stmt, *, lazily: bool) -> bool:
    """Whether a statement of an `__init__` only re-exports names; `lazily` allows PEP 562 too."""
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


def test_class_names_are_unique() -> None:
    found: dict[str, list[str]] = {}
    for name, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(name)
    assert not {name: modules for name, modules in found.items() if len(modules) > 1}


def test_no_module_argues_for_itself() -> None:
    """Decisions that matter are in docs/decisions.md."""
    formula = re.compile(r"\bChose\b")
    assert not [
        f"{name}: {line.strip()}" for name, text in TEXTS.items() for line in text.splitlines() if formula.search(line)
    ]


#: Private vocabulary that the field has words for, in prose and in identifiers; "doorbell" is one of those words.
WORDS = (
    *("door", "knock", "bell", "parcel", "crew", "nursery", "visit", "visitor", "stranger", "guest", "reception"),
    *("meeting", "tell", "told", "telling", "said", "nap", "deafen", "depart", "departure", "unheard"),
    *("nobody", "anybody", "everybody"),
)
RETIRED = re.compile(
    rf"(?<![A-Za-z])(?:{'|'.join(f'{word}|{word.capitalize()}|{word.upper()}' for word in WORDS)})"
    r"(?:s|S|ed|ing)?(?![a-z])"
)


def test_no_retired_words() -> None:
    """In names and texts of odc and of its tests."""
    found = [name for name in FILES if RETIRED.search(name)]
    tests = {path.name: path.read_text() for path in Path(__file__).parent.rglob("*.py") if path != Path(__file__)}
    for name, text in (TEXTS | tests).items():
        found += [f"{name}: {line.strip()}" for line in text.splitlines() if RETIRED.search(line)]
    assert RETIRED.search("_told") and not RETIRED.search("doorbell")
    assert not found


def test_the_tests_that_ci_runs_by_name_exist() -> None:
    """A file that was moved would end `make test-integrations` only after many minutes."""
    top = HOUSE.parent
    text = "".join((top / name).read_text(encoding="utf-8") for name in ("Makefile", ".ci/run"))
    named = set(re.findall(r"\btests/[\w/]+(?:\.\w+)?", text))
    assert len(named) > 10
    assert not [name for name in named if not (top / name).exists()]


SEAMS = ("odc.fsdp._torch_compat:", "odc.bench._torch_symmetric:", "odc.split._torch_private:")


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


def test_only_fsdp_uses_torchs_private_names_of_fsdp() -> None:
    users = {part(name) for name in FILES if "odc.fsdp._torch_compat" in imports(name)}
    assert users == {"fsdp"}


def test_extras_that_messages_name_exist() -> None:
    project = tomllib.loads((HOUSE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {extra for text in TEXTS.values() for extra in re.findall(r"\binstall\([\"']([a-z-]+)[\"']\)", text)}
    assert len(named) > 10
    assert not [name for name, text in TEXTS.items() if "odc-fsdp[" in text and name != "odc.errors"], "say `install`"
    assert named <= project["optional-dependencies"].keys()


def test_importing_odc_is_light_starts_nothing_and_reads_no_environment() -> None:
    """One program, as torch takes seconds to load."""
    program = """
import os, sys, threading
import numpy  # it may do as it pleases, as may torch below

class Watched(dict):
    def __getitem__(self, key): raise AssertionError(f"read {key} of the environment")
    get = __contains__ = __getitem__

allowed, os.environ._data = os.environ._data, Watched(os.environ._data)
import odc, odc.balance, odc.errors, odc.settings, odc.trace
assert set(odc.__all__) <= set(dir(odc))
assert "torch" not in sys.modules, "importing odc imported torch"
os.environ._data = allowed
import torch, torch.distributed.fsdp, torch.distributed.device_mesh
threads, descriptors = threading.active_count(), sorted(os.listdir("/proc/self/fd"))
os.environ._data = Watched(os.environ._data)
from odc import *
assert threading.active_count() == threads, "importing odc started a thread"
assert sorted(os.listdir("/proc/self/fd")) == descriptors, "importing odc left a file open"
heavy = {"typer", "rich", "matplotlib", "transformers", "tokenizers", "odc.kernels"} & set(sys.modules)
assert not heavy, f"importing odc imported {heavy}"
from odc.memory import atomics, processes
assert not processes._registered, "importing odc registered a fork handler"
assert atomics.default_atomics.cache_info().currsize == 0, "importing odc loaded a library of atomics"
assert fully_shard is odc.fully_shard is vars(odc)["fully_shard"]
for policy in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"):
    assert vars(odc)[policy] is getattr(torch.distributed.fsdp, policy), "torch's own: a port changes one line"
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
