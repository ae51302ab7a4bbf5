"""The README's program runs as it stands there."""

from __future__ import annotations

import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from odc.experiments.launch import launch

README = Path(__file__).parent.parent / "README.md"


def as_a_rank(script: str) -> None:
    runpy.run_path(script, run_name="__main__")


@pytest.mark.parametrize("by", ["launch", pytest.param("torchrun", marks=pytest.mark.thorough)])
def test_program_of_the_readme_runs(by: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On ranks that were forked, whose environment is torchrun's; and as a user starts it."""
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "loop.py"
    # A file a rank: what two ranks print may interleave.
    ending = f'open(f"{tmp_path}/rank-{{rank}}", "w").write(f"{{step}} {{loss.isfinite().item()}}")\n'
    script.write_text(program + ending, encoding="utf-8")
    if by == "launch":
        launch(as_a_rank, str(script), ranks=2)
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(README.parent)}
        subprocess.run(command, env=environment, check=True)
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["2 True", "2 True"]
    printed = capfd.readouterr().out
    losses = [float(loss) for loss in re.findall(r"^step \d: loss (\S+) a token$", printed, re.MULTILINE)]
    # An untrained model of 256 tokens spreads its guesses about evenly.
    assert len(losses) == 3 and all(abs(loss - math.log(256)) < 0.5 for loss in losses), printed


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:^|`)make ([a-z]+(?:-[a-z]+)*)", readme, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.fixture
def bench_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench` is a folder of modules, not an installed package."""
    monkeypatch.syspath_prepend(str(README.parent))


@pytest.mark.usefixtures("bench_folder")
def test_pictures_are_drawn_from_what_is_stored() -> None:
    from bench import changes_picture, hosts_picture

    for picture in (hosts_picture, changes_picture):
        assert picture.PICTURE.read_text(encoding="utf-8") == picture.svg(), "run `python -m bench.readme`"


def test_the_documentation_stays_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
    longest = {"protocol.md": 2_800, "decisions.md": 3_100, "hosts.md": 1_800, "glossary.md": 250}
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in (README.parent / "docs").glob("*.md")}
    assert not {name: count for name, count in words.items() if count > longest.get(name, 1_500)}


@pytest.mark.usefixtures("bench_folder")
def test_figures_of_the_pages_are_the_stored_ones() -> None:
    from bench.readme import PAGES, names, replaced, templates

    pages = {str(path): path.read_text(encoding="utf-8") for path in PAGES}
    stale = [name for name, text in pages.items() if replaced(text) != text]
    assert not stale, "run `python -m bench.readme`"
    quoted = [name for text in pages.values() for name in names(text)]
    assert set(quoted) == set(templates()), "each quote stands on a page"
    markers = sum(text.count("<!-- figures:") for text in pages.values())
    assert markers == 2 * len(quoted), "a marker is misspelt, so that its figures could drift"


@pytest.mark.usefixtures("bench_folder")
def test_a_changed_result_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import quotes
    from bench.readme import quote, templates

    stored = quotes.load("simulated_vs_emulated")
    slower = {**stored, "rows": [{**row, "simulated/emulated": 1.5} for row in stored["rows"]]}
    load = quotes.load
    monkeypatch.setattr(quotes, "load", lambda name: slower if name == "simulated_vs_emulated" else load(name))
    made = quote(templates()["trust"], "trust")
    assert "simulated step times are 1.50 of the emulated ones" in " ".join(made.split())


@pytest.mark.usefixtures("bench_folder")
def test_a_quote_has_paragraphs_items_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import quotes, readme

    figures = {"rows": [{"arm": "a", "s": 1.25}, {"arm": "b", "s": 2.5}], "worst": 2.5, "note": ""}
    monkeypatch.setattr(quotes, "figures_of", lambda name: figures)
    template = "| arm | time, s |\n|* {arm} | {s:.1f} |\n| worst | {worst:.1f} |\n\n{note}\n\n* " + "word " * 30
    rows = ["| arm   | time, s |", "| ----- | ------- |", "| a     | 1.2     |", "| b     | 2.5     |"]
    item = ["* " + " ".join(["word"] * 23), "  " + " ".join(["word"] * 7)]
    assert readme.quote(template, "any").splitlines() == [*rows, "| worst | 2.5     |", "", *item]
