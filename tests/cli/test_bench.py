from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from support.command import odc

from odc.bench import suite, tables
from odc.cli import bench, main

call = partial(odc, "bench")


@pytest.mark.thorough
def test_measures_saves_and_compares(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    path = tmp_path / "new" / "a.json"
    assert call("--quick", "--device", "cpu", "--only", "get,signal", "--sizes", "64K", "--json", str(path)) == 0
    captured = capfd.readouterr()
    assert "| get " in captured.out and "memcpy" in captured.out and str(path) in captured.out
    assert "odc bench: get, 2 ranks, 64 KiB" in captured.err
    rows = json.loads(path.read_text())["rows"]
    assert {row["what"] for row in rows} == {"get", "signal there and back"}
    assert call("--compare", str(path), str(path)) == 0
    assert "| get " in capfd.readouterr().out


@pytest.mark.parametrize(("text", "size"), [("65536", 65536), ("64K", 65536), (" 1m", 1 << 20), ("2G", 2 << 30)])
def test_sizes(text: str, size: int) -> None:
    assert bench._bytes(text) == size


def test_figures_that_cannot_be_written_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    measured: list[object] = []
    monkeypatch.setattr(suite, "run", lambda *options: measured.append(options))
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "a.json"
    assert call("--quick", "--device", "cpu", "--only", "get", "--json", str(path)) == 2
    assert f"odc: json: cannot write {path}: " in capfd.readouterr().err
    assert not measured


def test_figures_are_written_before_they_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"failed": [], "left_out": []}
    monkeypatch.setattr(suite, "run", lambda *options: measured)
    monkeypatch.setattr(tables, "show", lambda result: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["bench", "--quick", "--device", "cpu", "--only", "get", "--json", str(tmp_path / "a.json")])
    assert json.loads((tmp_path / "a.json").read_text()) == measured


def test_figures_are_shown_though_they_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    path = tmp_path / "a.json"

    def run(*_: object) -> dict[str, list[str]]:
        path.mkdir()
        return {"failed": [], "left_out": []}

    monkeypatch.setattr(suite, "run", run)
    monkeypatch.setattr(tables, "show", lambda result: f"table of {result}")
    assert call("--quick", "--device", "cpu", "--only", "get", "--json", str(path)) == 2
    captured = capfd.readouterr()
    assert "table of {'failed': []" in captured.out and f"odc: json: cannot write {path}: " in captured.err


def test_a_refusal_leaves_no_folder(tmp_path: Path) -> None:
    assert call("--device", "cpu", "--only", "got", "--json", str(tmp_path / "new" / "a.json")) == 2
    assert not list(tmp_path.iterdir())
