"""`odc simulate` as a user meets it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from support.command import odc

pytest.importorskip("typer", reason="needs the cli extra")

simulate = partial(odc, "simulate")

_SMALL = ("--ranks", "2", "--minibatches", "1", "--samples-per-rank", "2")


def test_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    assert simulate(*_SMALL, "--arms", "fsdp2,odc", "--slow", "1:2", "--json", str(path)) == 0
    shown = capsys.readouterr()
    assert "simulated" in shown.out and "odc" in shown.out and "bubble" in shown.out
    assert "mb: microbatches of whole samples a rank" in shown.out
    figures = json.loads(path.read_text())
    assert list(figures["study"]["arms"]) == ["fsdp2", "odc"]
    assert figures["study"]["scenario"]["slow"] == {"1": 2.0}
    assert figures["command"][0] == "odc"


def test_the_table_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """With every arm, several nodes, and figures of four digits."""
    assert simulate("--minibatches", "1", "--ranks", "16", "--model", "qwen2.5-14b", "--lengths", "swe-smith") == 0
    shown = capsys.readouterr()
    assert "…" not in shown.out and "e+0" not in shown.out and max(map(len, shown.out.splitlines())) <= 80
    assert "10 arms on the same minibatches" in shown.err


def test_hosts_with_links_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = ("--arms", "fsdp2,odc", "--ranks", "4", "--ranks-per-node", "2", "--json", str(tmp_path / "a.json"))
    assert simulate(*_SMALL, *arms, "--link-gbit", "10", "--link-ms", "0.5", "--node-cache") == 0
    assert "GB out" in capsys.readouterr().out
    found = json.loads((tmp_path / "a.json").read_text())["study"]["arms"]
    cached = ("--link-gbit", "10", "--link-ms", "0.5", "--node-cache")
    assert simulate(*_SMALL, *arms, *cached, "--changed", "0.07") == 0
    fewer = json.loads((tmp_path / "a.json").read_text())["study"]["arms"]
    assert fewer["odc"]["step_s"] < found["odc"]["step_s"]
    assert fewer["odc"]["node_bytes"] == pytest.approx(found["odc"]["node_bytes"] * (0.07 + 2) / 3)
    assert fewer["fsdp2"] | {"speedup": 1} == found["fsdp2"] | {"speedup": 1}
    assert simulate(*_SMALL, *arms, "--link-gbit", "1") == 0
    slower = json.loads((tmp_path / "a.json").read_text())["study"]["arms"]
    assert slower["odc"]["step_s"] > found["odc"]["step_s"] and slower["odc"]["node_bytes"] > found["odc"]["node_bytes"]


def test_yaml_and_flags(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="needs the simulate extra")
    job, path = tmp_path / "job.yaml", tmp_path / "a.json"
    job.write_text("ranks: 4\nminibatches: 1\narms: [odc]\n")
    assert simulate(str(job), "--ranks", "2", "--json", str(path)) == 0
    scenario = json.loads(path.read_text())["study"]["scenario"]
    assert (scenario["ranks"], scenario["minibatches"], scenario["arms"]) == (2, 1, ["odc"])


def test_sweeps_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    picture, path = tmp_path / "a.png", tmp_path / "a.json"
    options = ("--arms", "odc", "--sweep", "packing_ratio", "--picture", str(picture), "--json", str(path))
    assert simulate(*_SMALL, *options) == 0
    assert picture.stat().st_size > 1000
    assert len(json.loads(path.read_text())["sweeps"]["packing_ratio"]) == 4
