"""The documentation against the code: what it lists is there, what is there it lists, and its links lead somewhere."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import odc.errors
from odc.fsdp import OdcModule

ROOT = Path(__file__).parent.parent
RESULTS = [ROOT / "bench" / "results" / name for name in ("README.md", "reproduction.md")]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *RESULTS, ROOT / "tests" / "gpu" / "README.md"]


def table(page: str, heading: str) -> dict[str, list[str]]:
    """Rows of the first table under a heading, by each name (without back-ticks) of their first cell."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").split(f"\n{heading}\n")[1]
    rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert rows, f"{page}: no table under {heading}"
    cells = [[cell.strip() for cell in row.strip("| \n").split("|")] for row in rows[0].splitlines()[2:]]
    return {name.strip("` "): row[1:] for row in cells for name in row[0].split(",")}


def public_methods(cls: type) -> set[str]:
    return {name for name, value in vars(cls).items() if inspect.isfunction(value) and not name.startswith("_")}


def numbers(version: str) -> tuple[int, ...]:
    """The first two of a version."""
    return tuple(int(part) for part in version.split(".")[:2])


def test_every_public_method_of_fsdp2_is_listed() -> None:
    methods = table("fsdp.md", "## Methods of `FSDPModule`")
    assert public_methods(FSDPModule) <= methods.keys()
    version = numbers(torch.__version__)
    here = {name for name, (since, *_) in methods.items() if since == "all" or version >= numbers(since)}
    assert here == public_methods(FSDPModule)


def test_what_fsdp2_methods_become_is_what_the_code_does() -> None:
    methods = table("fsdp.md", "## Methods of `FSDPModule`")
    for name, (_, what) in methods.items():
        refused = inspect.isfunction(vars(OdcModule).get(name)) and "Refused" in (vars(OdcModule)[name].__doc__ or "")
        no_effect = "No-op" in (getattr(vars(OdcModule).get(name), "__doc__", None) or "")
        assert what.startswith("refused") == refused, name
        assert what.startswith("no effect") == no_effect, name


def test_new_methods_are_listed() -> None:
    text = (ROOT / "docs" / "fsdp.md").read_text(encoding="utf-8")
    for name in public_methods(OdcModule):
        assert f"`{name}`" in text or f"`{name}()`" in text, name


def test_every_error_has_its_section() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    errors = [name for name, value in vars(odc.errors).items() if isinstance(value, type) and name.endswith("Error")]
    for name in errors:
        assert re.search(rf"^###? `{name}`", text, re.MULTILINE), name
    for heading in re.findall(r"^### (`\w+Error`.*)$", text, re.MULTILINE):
        for name, module in re.findall(r"`(\w+)`(?: \(of `([\w.]+)`\))?", heading):
            known = vars(importlib.import_module(module or "odc.errors")) | vars(builtins)
            assert isinstance(known.get(name), type), heading


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]
            assert anchor in slugs, target


def test_pages_that_the_code_names_exist() -> None:
    folders = ("odc", "triton_kernels", "bench", "tests", "examples")
    files = [ROOT / "Makefile", *(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))]
    named = {
        (str(path.relative_to(ROOT)), page)
        for path in files
        for page in re.findall(r"\b(?:docs|bench/results)/\w+\.md\b", path.read_text(encoding="utf-8"))
    }
    assert named
    assert not [one for one in sorted(named) if not (ROOT / one[1]).exists()]


def programs(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    found = re.findall(
        r"^( *)```python\n(.*?)^\1```", (ROOT / "docs" / page).read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    return [textwrap.dedent(block) for _, block in found]


def test_the_programs_of_the_quickstart_run(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = programs("quickstart.md")
    exec(compile(program, "quickstart", "exec"), {})
    assert capsys.readouterr().out == "[[[0]], [[1, 2, 3]]]\n"


def test_the_program_of_the_planners_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(programs("balance.md")[0], "balance", "exec"), {"lengths": [60_000, 900, 100, 80, 60, 9_000]})
    assert "lower bound" in capsys.readouterr().out


def test_the_program_of_the_simulator_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = programs("simulate.md")
    exec(compile(program, "simulate", "exec"), {})
    bubbles = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert len(bubbles) == 2 and all(0 < bubble < 1 for bubble in bubbles)


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_programs_import_what_odc_has(page: str) -> None:
    """Names that a page imports from odc are there; integrations need their libraries, and have tests of their own."""
    for program in programs(page):
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.ImportFrom) and node.module and re.match(r"odc\b(?!\.integrations)", node.module):
                found = importlib.import_module(node.module)
                for one in node.names:
                    if not hasattr(found, one.name):
                        importlib.import_module(f"{node.module}.{one.name}")
