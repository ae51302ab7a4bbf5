"""The origin that stored figures name."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from odc import provenance
from odc.bench.report import store


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code.py").write_text("1\n")
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "old.json").write_text("1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "one")
    return tmp_path


def test_a_clean_tree_is_its_commit(checkout: Path) -> None:
    assert provenance.commit(checkout) == git(checkout, "rev-parse", "HEAD")


@pytest.mark.parametrize("name", ["code.py", "new.py"])
def test_a_changed_or_untracked_file_makes_the_tree_dirty(checkout: Path, name: str) -> None:
    (checkout / name).write_text("2\n")
    assert provenance.commit(checkout) == git(checkout, "rev-parse", "HEAD") + "+dirty"


def test_new_results_and_the_pages_that_quote_them_do_not_make_the_code_dirty(checkout: Path) -> None:
    (checkout / "docs").mkdir()
    for name in ("bench/results/old.json", "bench/results/new.json", "docs/hosts.md", "README.md"):
        (checkout / name).write_text("2\n")
    assert provenance.commit(checkout) == git(checkout, "rev-parse", "HEAD")


def test_a_package_inside_another_repository_has_no_commit(checkout: Path) -> None:
    installed = checkout / "site-packages"
    installed.mkdir()
    assert provenance.commit(installed) is None


def test_without_git_there_is_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert provenance.commit(checkout) is None


def test_the_load_is_taken_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([(0.251, 9.0, 9.0), (3.129, 9.0, 9.0)])
    monkeypatch.setattr(os, "getloadavg", lambda: next(loads))
    before = datetime.now(UTC).strftime("%Y-%m-%d")
    begun = provenance.begin()
    facts = begun.facts()
    assert facts["load_1min"] == {"begin": 0.25, "end": 3.13}
    assert before <= facts["date"] <= datetime.now(UTC).strftime("%Y-%m-%d")


def test_a_stored_benchmark_names_its_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = provenance.Measurement("abc+dirty", "2026-01-02", 0.5)
    store(tmp_path, "one", "A title", [{"a": 1}], begun=begun)
    stored = json.loads((tmp_path / "one.json").read_text())
    assert (stored["commit"], stored["date"], stored["load_1min"]["begin"]) == ("abc+dirty", "2026-01-02", 0.5)
    assert stored["machine"]["cores"] >= 1
    page = (tmp_path / "one.md").read_text()
    assert "2026-01-02, commit abc+dirty, load 0.5 at the beginning and" in page
    assert "A title" in capsys.readouterr().out
