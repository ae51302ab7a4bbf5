"""What `--extent` selects, in a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.extent import LONGEST

TESTS = """
import pytest
from hypothesis import given, strategies

def test_alone(): ...

@pytest.mark.thorough
def test_second_look(): ...

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", ["x", "y"])
def test_grid(a, b): ...

@pytest.mark.parametrize(("a", "b"), [(1, "x"), (1, "y"), (2, "x"), (2, "y")])
def test_rows(a, b): ...

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_marked_case(a): ...

@given(strategies.integers())
def test_property(n):
    with open("examples", "a") as file:
        file.write("once\\n")

class TestOfOne:
    @pytest.mark.parametrize("a", [1])
    def test_same_name(self, a): ...

class TestOfAnother(TestOfOne): ...
"""
EVERY_BEHAVIOUR = {
    "test_alone", "test_grid[x-1]", "test_grid[y-2]", "test_grid[x-3]", "test_rows[1-x]", "test_rows[1-y]",
    "test_rows[2-x]", "test_rows[2-y]", "test_marked_case[1]", "test_property", "TestOfOne::test_same_name[1]",
    "TestOfAnother::test_same_name[1]",
}  # fmt: skip
SECOND_LOOKS = {"test_second_look", "test_grid[y-1]", "test_grid[x-2]", "test_grid[y-3]", "test_marked_case[2]"}
EXPECTED = {
    "quick": EVERY_BEHAVIOUR,
    "rest": SECOND_LOOKS | {"test_property"},
    "all": EVERY_BEHAVIOUR | SECOND_LOOKS,
}


def pytest_in(folder: Path, *options: str) -> str:
    """What pytest prints of the tests in a folder, with the options of this one."""
    here = Path(__file__).parent
    (folder / "conftest.py").write_text((here / "conftest.py").read_text().replace("__file__", repr(str(here / "x"))))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = thorough\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("extent", EXPECTED)
def test_the_halves_overlap_in_properties_alone(extent: str, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    printed = pytest_in(tmp_path, "-v", "--extent", extent)
    assert set(re.findall(r"test_some\.py::(\S+) PASSED", printed)) == EXPECTED[extent]
    tried = (tmp_path / "examples").read_text().count("once")
    assert tried == {"quick": 20}.get(extent, 100)


def test_each_turn_begins_with_another_file_and_no_test_begins_when_time_is_over(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text("def test_first(): ...\ndef test_second(): ...")
    for turn, begun in ((3, "aabbcc"), (4, "bbccaa"), (5, "ccaabb")):
        listed = pytest_in(tmp_path, "--collect-only", "-q", "--turn", str(turn))
        assert re.findall(r"test_(.)\.py::", listed) == list(begun)
    assert "6 passed in" in pytest_in(tmp_path, "--until", str(time.time() + 3600))
    assert re.search(r"SKIPPED \[6\] .*: no time is left\n", pytest_in(tmp_path, "-rs", "--until", str(time.time())))


def test_the_files_that_begin_first_exist() -> None:
    assert not [name for name in LONGEST if not (Path(__file__).parent / name).is_file()]
