"""`odc simulate` as a user meets it."""

from __future__ import annotations

import errno
import json
import sys
from functools import partial
from pathlib import Path

import pytest
from support.command import odc

from odc.cli import main
from odc.simulate import report
from odc.simulate.study import Study

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


def test_figures_are_written_before_they_are_shown_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    path = tmp_path / "a.json"
    options = (*_SMALL, "--arms", "odc", "--sweep", "packing_ratio", "--json", str(path))

    def fails(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report, "draw_sweeps", fails)
    assert simulate(*options, "--picture", str(tmp_path / "a.png")) == 2
    assert f"odc: picture: cannot write {tmp_path / 'a.png'}: No space left" in capsys.readouterr().err
    assert len(json.loads(path.read_text())["sweeps"]["packing_ratio"]) == 4
    monkeypatch.setattr(report, "study_table", fails)
    with pytest.raises(SystemExit, match="1"):
        main(["simulate", *options])
    assert "odc: [Errno 28] No space left on device" in capsys.readouterr().err
    assert json.loads(path.read_text())["study"]["arms"].keys() == {"odc"}


def test_a_picture_without_a_suffix_is_a_png(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    monkeypatch.chdir(tmp_path)
    assert simulate(*_SMALL, "--arms", "odc", "--sweep", "packing_ratio", "--picture", "drawn") == 0
    assert "picture  drawn.png\n" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["drawn.png"]


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[Study.__module__], "study", lambda scenario: pytest.fail("it is simulated"))


@pytest.mark.usefixtures("nothing_runs")
def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    options = (*_SMALL, "--sweep", "all", "--picture")
    assert simulate(*options, str(tmp_path / "a.bmp")) == 2
    assert f"odc: picture: cannot write {tmp_path / 'a.bmp'}: Format 'bmp' is not supported" in capsys.readouterr().err
    (tmp_path / "a.png").mkdir()
    for folder in (tmp_path, tmp_path / "a.png"):
        assert simulate(*options, str(folder)) == 2
        assert f"odc: picture: cannot write {folder}: Is a directory\n" in capsys.readouterr().err
    (tmp_path / "b.png").mkdir()
    assert simulate(*options, str(tmp_path / "b")) == 2
    assert f"odc: picture: cannot write {tmp_path / 'b.png'}: Is a directory\n" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert simulate(*options, str(tmp_path / "c.png")) == 2
    assert "odc: drawing needs matplotlib: " in capsys.readouterr().err


def test_infinite_figures_are_null(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert simulate(*_SMALL, "--arms", "odc", "--intra-bandwidth", "inf", "--json", str(path)) == 0
    figures = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert figures["study"]["scenario"]["intra_bandwidth"] is None


def test_a_picture_without_a_sweep_is_refused_before_anything_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(*_SMALL, "--picture", str(tmp_path / "a.png")) == 2
    shown = capsys.readouterr()
    assert "picture: say what to draw it along" in shown.err and not shown.out


def test_a_sweep_of_lengths_that_are_too_short_to_cut(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    (tmp_path / "lengths.txt").write_text("100 60 12")
    options = ("--lengths", str(tmp_path / "lengths.txt"), "--arms", "odc", "--sweep", "max_length")
    output = ("--picture", str(tmp_path / "a.png"), "--json", str(tmp_path / "a.json"))
    assert simulate(*_SMALL, *options, *output) == 0
    swept = json.loads((tmp_path / "a.json").read_text())["sweeps"]["max_length"]
    assert [one["scenario"]["max_length"] for one in swept] == [25, 50, 100]


def test_a_sweep_without_a_value_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lengths.txt").write_text("10 6 12")
    options = ("--lengths", str(tmp_path / "lengths.txt"), "--arms", "odc", "--sweep", "max_length")
    assert simulate(*_SMALL, *options) == 2
    assert "sweep: no value along max_length" in capsys.readouterr().err
