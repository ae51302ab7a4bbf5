"""The HTML report of a comparison: what it says, that it needs no other file, and what a browser shows of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from odc.cli import main
from odc.errors import OdcError
from odc.experiments.html import write_html
from odc.experiments.table import tables

mpl_image = pytest.importorskip("matplotlib.image", reason="needs the plot extra")
pytest.importorskip("jinja2", reason="needs the plot extra")
pytest.importorskip("rich", reason="needs the cli extra")

DEMO = Path(__file__).resolve().parents[2] / "bench" / "results" / "demo.json"
_BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Every cell of every table, row by row, and whatever the page loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.sources: list[str] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.rows[-1][-1] += data


@pytest.fixture
def figures() -> dict:
    return json.loads(DEMO.read_text())


def written(tmp_path: Path, figures: dict) -> Path:
    path = tmp_path / "report.html"
    mpl_image.imsave(tmp_path / "timeline.png", np.zeros((40, 400, 3)))
    write_html(path, figures, tables(figures, 10_000), tmp_path / "timeline.png")
    return path


def test_the_report_holds_every_figure_of_the_table_and_every_setting(tmp_path: Path, figures: dict) -> None:
    figures["command"] = ["odc", "compare", "--data", "<a & b>"]
    text = written(tmp_path, figures).read_text()
    page = Page(text)
    assert page.rows[0] == ["", *figures["arms"]]
    cells = {row[0]: row[1:] for row in page.rows[1:]}
    assert cells["step, s"] == [f"{arm['step_s']['median']:.2f}" for arm in figures["arms"].values()]
    assert cells["final loss"] == [f"{arm['loss']['final']:.6f}" for arm in figures["arms"].values()]
    assert cells["minibatch_size"] == [str(figures["job"]["minibatch_size"])]
    assert figures["commit"] in text and "&lt;a &amp; b&gt;" in text and "<a &" not in text


def test_the_report_needs_no_other_file(tmp_path: Path, figures: dict) -> None:
    text = written(tmp_path, figures).read_text()
    sources = Page(text).sources
    assert [source.split(",")[0] for source in sources] == ["data:image/svg+xml;base64", "data:image/png;base64"]
    assert not re.search(r"<link|<script|@import|url\(", text)


def test_without_jinja2_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: object) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(SystemExit):
        main(["compare", "--demo", "--report", "--output", str(tmp_path / "out")])
    assert "odc-fsdp[plot]" in capfd.readouterr().err  # type: ignore[attr-defined]
    assert not (tmp_path / "out").exists()
    with pytest.raises(OdcError, match=r"odc-fsdp\[plot\]"):
        write_html(tmp_path / "x.html", {}, [], None)


@pytest.mark.skipif(_BROWSER is None, reason="needs Chromium (Debian: chromium)")
@pytest.mark.thorough
def test_a_browser_shows_it_on_light_and_on_dark(tmp_path: Path, figures: dict) -> None:
    path = written(tmp_path, figures)
    corners = {}
    for scheme, option in (("light", "--blink-settings=preferredColorScheme=1"), ("dark", "--force-dark-mode")):
        shot = tmp_path / f"{scheme}.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1500"]
        where = [f"--user-data-dir={tmp_path / scheme}", f"--screenshot={shot}", path.as_uri()]
        subprocess.run([str(_BROWSER), *options, option, *where], check=True, capture_output=True, timeout=300)
        pixels = np.round(mpl_image.imread(shot)[..., :3] * 255).astype(int)
        corners[scheme] = pixels[2, 2].tolist()
        for colour in ([0x27, 0x49, 0x6D], [0xD8, 0x43, 0x1F]):  # the lines of the first two arms
            assert (pixels == colour).all(axis=-1).sum() > 100, (scheme, colour)
        ink = (np.abs(pixels - pixels[2, 2]).sum(axis=-1) > 100).mean()
        assert 0.005 < ink < 0.9, f"{scheme}: {ink:.1%} of the page is not background"
    assert min(corners["light"]) > 230 and max(corners["dark"]) < 60
