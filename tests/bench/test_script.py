"""The command line of the scripts in bench/, and what they store."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.script import Script


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> Script:
    monkeypatch.setattr(sys, "argv", ["script", *words])
    return Script(
        "About.",
        regime=("short", "lengths", ("short", "long")),
        counts=([1, 2], "samples a rank"),
        max_tokens=(512, "cap"),
        gloo=(False, "by way of the host"),
    )


def test_an_option_has_the_type_of_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    given = vars(parsed(monkeypatch).given)
    usual = {"regime": "short", "counts": [1, 2], "max_tokens": 512, "gloo": False, "results": Path("runs/bench")}
    assert given == usual
    words = ["--regime", "long", "--counts", "4", "--max-tokens", "9", "--gloo", "--results", "there"]
    given = vars(parsed(monkeypatch, *words).given)
    assert given == {"regime": "long", "counts": [4], "max_tokens": 9, "gloo": True, "results": Path("there")}


def test_another_choice_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--regime", "none")
    assert "invalid choice: 'none'" in capsys.readouterr().err


def test_a_stored_result_has_its_origin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parsed(monkeypatch, "--results", str(tmp_path)).store("name", "Title", [{"arm": "odc"}], seed=3)
    result = json.loads((tmp_path / "name.json").read_text())
    assert (result["title"], result["rows"], result["seed"]) == ("Title", [{"arm": "odc"}], 3)
    assert result.keys() >= {"command", "commit", "date", "load_1min", "machine", "versions"}
    assert "# Title" in (tmp_path / "name.md").read_text()
