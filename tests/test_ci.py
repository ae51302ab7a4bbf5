"""The table of `.ci/run`, with a `make` that does nothing."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKE = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/asked"
case "$*" in
    "{failing}"*) echo "1 failed, 7 skipped in 2.00s"; exit 2 ;;
    "test "*) echo "12 passed, 3 skipped in 4.50s" ;;
    test-emulated*) echo "2 passed, 4 skipped in 3.00s" ;;
    test-integrations*) echo "== 5 passed, 10 skipped, 1 warning in 70.00s (0:01:10) =="; echo "2 skipped in 0.10s" ;;
esac
"""


def table(folder: Path, failing: str, commits: int = 1) -> tuple[int, dict[str, tuple[int, str]]]:
    """The exit code, and of each part its skipped tests and whether it failed."""
    for name, text in (("make", MAKE.replace("{failing}", failing)), ("git", f"#!/bin/sh\necho {commits}\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, check=False)
    _, _, rows = done.stdout.rpartition("part ")
    found = re.findall(r"^(\S.*?) +\d+ +(\d+) +\d+( +failed)?$", rows, re.MULTILINE)
    return done.returncode, {name: (int(skipped), failed.strip()) for name, skipped, failed in found}


def test_every_part_is_timed_and_its_skips_are_counted(tmp_path: Path) -> None:
    code, parts = table(tmp_path, failing="nothing")
    assert code == 0
    assert {"lint", "demo"} < parts.keys() and not any(failed for _, failed in parts.values())
    assert (parts["tests, quick"][0], parts["tests, rest"][0], parts["tests, integrations"][0]) == (3, 0, 12)
    assert parts["tests, emulated CUDA"][0] == 2 * 4, "with two versions of torch"


def test_a_version_that_fails_over_emulated_cuda_is_not_lost(tmp_path: Path) -> None:
    code, parts = table(tmp_path, failing="test-emulated TORCH=2.11.0")
    assert code == 2 and parts["tests, emulated CUDA"] == (7, "failed")


def test_a_part_that_fails_is_the_last(tmp_path: Path) -> None:
    code, parts = table(tmp_path, failing="test-all")
    assert code == 2
    assert list(parts)[-2:] == ["tests, integrations", "tests, rest"]
    assert parts["tests, rest"] == (7, "failed")


def test_the_parts_after_the_quick_one_end_in_time(tmp_path: Path) -> None:
    """Whatever the runner: no test begins after a moment that leaves room for the parts behind."""
    before = int(time.time())
    table(tmp_path, failing="nothing")
    tests = [line for line in (tmp_path / "asked").read_text().splitlines() if line.startswith("test")]
    ends = [re.search(r" --turn [1-9]\d* --until (\d+)$", line) for line in tests[2:]]
    assert [line.split()[0] for line in tests[:2]] == ["test", "test"]
    moments = [int(found[1]) - before for found in ends if found]
    assert len(moments) == len(tests) - 2 and moments == sorted(moments)
    assert moments[0] > 3600 and moments[-1] < 5400 - 300, "of 90 minutes; a test that has begun may take minutes"


@pytest.mark.parametrize(("commits", "emulated"), [(1, "2.13.0"), (2, "2.15.0")])
def test_no_environment_of_another_torch_or_python_outlives_its_last_test(
    tmp_path: Path, commits: int, emulated: str
) -> None:
    """All at once they took more than the disk of a runner has."""
    table(tmp_path, failing="nothing", commits=commits)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[1] for line in asked if line.startswith("test-emulated")] == [
        "TORCH=2.11.0",
        f"TORCH={emulated}",
    ]
    dropped = {line.removeprefix("drop NAME="): at for at, line in enumerate(asked) if line.startswith("drop ")}
    used = {
        f"torch-{found[1]}": at
        for at, line in enumerate(asked)
        if (found := re.search(r"^test\S* .*TORCH=(\S+)", line))
    }
    used |= {found[1]: at for at, line in enumerate(asked) if (found := re.search(r"VENV=\.venv-(\S+)", line))}
    assert used.keys() == dropped.keys() == {"python3.13", "torch-2.11.0", "torch-2.15.0", f"torch-{emulated}"}
    assert all(used[name] < at for name, at in dropped.items())
