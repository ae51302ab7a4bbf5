"""Which tests may skip where CI is set, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = """
import pytest
from support import hosts

def test_passes(): ...

@pytest.mark.skipif(True, reason="needs root to be two users")
def test_marked(): ...

def test_called():
    pytest.skip("could not import 'scipy'")

def test_hosts(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    hosts.need_hosts()

@pytest.fixture
def cuda():
    pytest.skip("no CUDA device here (`odc doctor` says what is missing)")

def test_device(cuda): ...

@pytest.mark.skip(reason="needs trl: make test-integrations")
def test_of_another_environment(): ...

@pytest.mark.xfail(reason="not yet", strict=True)
def test_expected():
    raise AssertionError
"""
MODULE = "import pytest\npytest.importorskip('no_such_package')\ndef test_never(): ..."
LISTED = {"test_device", "test_of_another_environment"}
OTHERS = {"test_marked", "test_called", "test_hosts", "test_module.py"}


@pytest.mark.parametrize("ci", ["true", ""])
def test_only_what_is_listed_may_skip_in_ci(ci: str, tmp_path: Path) -> None:
    here = Path(__file__).parent
    (tmp_path / "conftest.py").write_text((here / "conftest.py").read_text().replace("__file__", repr(str(here / "x"))))
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = thorough\n")
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    done = subprocess.run(
        [*command, "--no-fold-skipped"],
        cwd=tmp_path,
        env={**os.environ, "CI": ci, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    _, _, summary = done.stdout.partition("short test summary info")
    found = defaultdict[str, set[str]](set)
    for line in summary.splitlines()[1:-1]:
        word, where, *_ = line.split()
        found[word].add(where.rpartition("::")[2])
    assert found["PASSED"] == {"test_passes"} and found["XFAIL"] == {"test_expected"}, done.stdout
    assert found["FAILED"] | found["ERROR"] == (OTHERS if ci else set()), done.stdout
    assert found["SKIPPED"] == (LISTED if ci else LISTED | OTHERS), done.stdout
    assert "hosts need root, to make network namespaces" in summary
    assert done.returncode == (1 if ci else 0)
