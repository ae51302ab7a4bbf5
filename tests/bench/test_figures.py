"""Figures that README and docs/ quote: measured at one commit, on a clean tree, each by a step of `make figures`."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import figures, quotes, readme, stored

STORED = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in stored.RESULTS.glob("*.json")}


def test_every_stored_result_is_quoted_and_has_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    read, read_text = set[str](), Path.read_text

    def noted(self: Path, *args: Any, **kwargs: Any) -> str:
        if self.parent == stored.RESULTS and self.suffix == ".json" and self.exists():
            read.add(self.stem)
        return read_text(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", noted)
    for name in readme.templates():
        with contextlib.suppress(FileNotFoundError):
            quotes.figures_of(name)
    taken = [name for step in figures.STEPS for name in step.stores]
    assert set(STORED) == read
    assert read <= set(taken), "a step may be new, and its result taken when all are taken next"
    assert len(taken) == len(set(taken))


@pytest.mark.parametrize("name", sorted(STORED))
def test_a_stored_result_names_its_origin(name: str) -> None:
    result = STORED[name]
    assert re.fullmatch(r"[0-9a-f]{40}", str(result.get("commit"))), "taken on a dirty tree, or at an unknown commit"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    assert set(result["load_1min"]) == {"begin", "end"}
    assert result["command"]


def test_all_figures_that_were_measured_were_measured_at_one_commit() -> None:
    """What is simulated depends on no machine: it is taken again when its code changes, and says when it was."""
    commits = {name: result.get("commit") for name, result in STORED.items() if result.get("measured", True)}
    assert len(set(commits.values())) == 1, f"run `make figures`: {commits}"


def step_that(stores: str, program: str) -> figures.FigureStep:
    """A step that runs `program` as a module of the folder that is patched in as ROOT."""
    (figures.ROOT / f"{stores}_step.py").write_text(program)
    return figures.FigureStep(f"{stores}_step", (stores,))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where steps run and store."""
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "load", lambda name: json.loads((tmp_path / f"{name}.json").read_text()))
    return tmp_path


def storing(name: str, commit: str) -> str:
    return f"open('{name}.json', 'w').write('{{\"commit\": \"{commit}\"}}'); open('ran', 'a').write('{name} ')"


def test_a_run_skips_what_is_stored_and_goes_on_after_a_failure(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        step_that("kept", storing("kept", "abc")),
        step_that("fails", "raise SystemExit(3)"),
        step_that("dirty", storing("dirty", "abc+dirty")),
        step_that("new", storing("new", "abc")),
    ]
    (folder / "kept.json").write_text('{"commit": "abc"}')
    (folder / "new.json").write_text('{"commit": "older"}')
    failed = figures.take_all(steps, "abc", limit_s=0.0)
    assert [one.partition(":")[0] for one in failed] == ["fails", "dirty"]
    assert (folder / "ran").read_text() == "dirty new "
    printed = capsys.readouterr().out
    assert "[1/4] kept: stored at this commit" in printed
    assert re.search(r"\[4/4\] new: done \(\d+ s, .* load \d+\.\d\d before\)", printed)
    assert not figures.take_all([steps[0], steps[3]], "abc", limit_s=0.0)
    assert (folder / "ran").read_text() == "dirty new ", "all was stored"
    assert not figures.take_all([steps[0]], "abc", again=True, limit_s=0.0)
    assert (folder / "ran").read_text() == "dirty new kept "


@pytest.mark.parametrize("state", [None, "abc+dirty"])
def test_a_dirty_tree_is_refused(state: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "commit", lambda: state)
    monkeypatch.setattr(sys, "argv", ["figures"])
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("it began"))
    with pytest.raises(SystemExit, match="clean checkout"):
        figures.main()


def test_pages_name_what_is_stale_or_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "load", lambda name: {"commit": "a" * 40})

    def noted(commit: str | None, begin: float | None) -> str:
        load = {} if begin is None else {"load_1min": {"begin": begin, "end": 50.0}}
        return stored.note({"commit": commit, **load})

    assert noted("a" * 40, 0.9) == "", "ranks make the load at the end"
    assert noted("a" * 40, 1.4) == " (Taken on a busy machine: load 1.4 before it began.)"
    assert noted("b" * 40, 0.0) == " (Taken at commit bbbbbbb.)"
    assert noted(None, None) == " (Taken at an unknown commit, at an unknown load.)"
    simulated = {"commit": "b" * 40, "measured": False, "load_1min": {"begin": 9.0, "end": 9.0}}
    assert stored.note(simulated) == " (Taken at commit bbbbbbb.)", "no load changes what is simulated"


def test_arms_of_changes_stand_in_the_order_of_their_seconds_over_the_limited_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = {  # over 1 Gbit, and without a limit
        "whole": (2.0, 1.0),
        "changes": (1.5, 1.2),
        "auto": (1.7, 1.0),
        "int8": (1.25, 1.4),
        "alone": (1.0, 0.9),
    }
    rows = [
        {
            "link": link,
            "learning rate": 1e-5,
            "arm": arm,
            "seconds": both[place],
            "seconds of whole": both[place] / seconds["whole"][place],
            "out of whole": 0.5,
            "CPU of whole": 1.0,
        }
        for place, link in enumerate(("1gbit", "not limited"))
        for arm, both in seconds.items()
    ]
    monkeypatch.setattr(quotes, "stored", lambda name: {"rows": rows})
    found = quotes.changes()
    assert [row["arm"] for row in found["rows"]] == ["int8", "changes", "auto", "whole"], "`alone` is no rival"
    assert found["rows"][0] == {"arm": "int8", "out": "0.50", "limited": "0.62", "free": "1.40", "cpu": "1.00"}
    assert found["remain"] == {"changes": "0.50", "auto": "0.70", "int8": "0.25"}, "of the second beyond `alone`"
