"""What `--extent` selects, in a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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


@pytest.mark.parametrize("extent", EXPECTED)
def test_the_halves_overlap_in_properties_alone(extent: str, tmp_path: Path) -> None:
    here = Path(__file__).parent
    (tmp_path / "conftest.py").write_text((here / "conftest.py").read_text().replace("__file__", repr(str(here / "x"))))
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = thorough\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "--extent", extent, "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(re.findall(r"test_some\.py::(\S+) PASSED", done.stdout)) == EXPECTED[extent]
    tried = (tmp_path / "examples").read_text().count("once")
    assert tried == {"quick": 20}.get(extent, 100)


def test_the_files_that_begin_first_exist() -> None:
    assert not [name for name in LONGEST if not (Path(__file__).parent / name).is_file()]
