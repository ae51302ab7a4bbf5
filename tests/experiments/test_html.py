"""The HTML report of a comparison: what it says, and that it needs no other file."""

from __future__ import annotations

import json
import re
import sys
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from odc.cli import main
from odc.experiments.html import PAGE_WIDTH, write_html
from odc.experiments.table import tables

mpl_image = pytest.importorskip("matplotlib.image", reason="needs the plot extra")
pytest.importorskip("rich", reason="needs the cli extra")

DEMO = Path(__file__).resolve().parents[2] / "bench" / "results" / "demo.json"


def test_the_report_holds_table_settings_and_pictures_and_needs_no_other_file(tmp_path: Path) -> None:
    figures = json.loads(DEMO.read_text())
    figures["command"] = ["odc", "compare", "--data", "<a & b>"]
    mpl_image.imsave(tmp_path / "timeline.png", np.zeros((40, 400, 3)))
    path = tmp_path / "report.html"
    write_html(path, figures, tables(figures, PAGE_WIDTH), tmp_path / "timeline.png")
    page = path.read_text()
    lines = [line.split() for line in unescape(re.sub("<[^>]*>", "", page)).splitlines()]
    arms = figures["arms"].values()
    assert list(figures["arms"]) in lines
    assert ["step,", "s", *(f"{arm['step_s']['median']:.2f}" for arm in arms)] in lines
    assert ["final", "loss", *(f"{arm['loss']['final']:.6f}" for arm in arms)] in lines
    assert ["minibatch_size", str(figures["job"]["minibatch_size"])] in lines
    assert figures["commit"] in page and "&lt;a &amp; b&gt;" in page and "<a &" not in page
    sources = re.findall(r'(?:src|href)="([^,"]*)', page)
    assert sources == ["data:image/svg+xml;base64", "data:image/png;base64"]
    assert not re.search(r"<link|<script|@import|url\(", page)


def test_without_matplotlib_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main(["compare", "--demo", "--report", "--output", str(tmp_path / "out")])
    assert "odc-fsdp[plot]" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
