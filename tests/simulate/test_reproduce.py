"""The reproduction: what a row says, and the page that is in docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from odc.simulate.published import CELLS, FIGURES
from odc.simulate.reproduce import Studies, letter, page, reproduce
from odc.simulate.statements import STATEMENTS
from odc.simulate.study import Study, study

PAGE = Path(__file__).parents[2] / "bench" / "results" / "reproduction.md"


def test_each_figure_is_one_that_its_cell_simulates() -> None:
    for figure in FIGURES:
        assert {figure.arm, figure.base if figure.kind == "speedup" else figure.arm} <= set(CELLS[figure.cell].arms)
        assert figure.why


def test_rows_follow_one_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {cell: scenario.with_(ranks=2, model="qwen2.5-1.5b") for cell, scenario in CELLS.items()}
    monkeypatch.setattr("odc.simulate.reproduce.CELLS", small)
    monkeypatch.setattr("odc.simulate.reproduce.STATEMENTS", ())
    rows = reproduce(1, 0, lambda text: None)
    assert len(rows) == len(FIGURES)
    for row, figure in zip(rows, FIGURES, strict=True):
        ours = float(row.ours.rstrip("x%")) / (100 if figure.kind == "bubble" else 1)
        off = max(figure.low - ours, ours - (figure.high or figure.low))
        if abs(off - 0.05) > 0.006:  # beyond what two digits can tell
            assert row.agrees == (off < 0.05)
        least, most = (float(end.rstrip("x%")) for end in row.spread.split("-"))
        assert least <= float(row.ours.rstrip("x%")) <= most
    text = page(rows, 1, 0)
    assert f"**{sum(row.agrees for row in rows)} of {len(rows)} agree**" in text
    assert text.count("\n| ") >= len(rows) + len(CELLS)
    assert all(f"\n* {letter(i)}: {why}.\n" in text for i, why in enumerate({r.why: 0 for r in rows if not r.agrees}))


def test_statements_look_at_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trends hold for studies that have them, and fail for ones that do not."""
    flat = study(CELLS["1.5B LongAlign"].with_(minibatches=1, ranks=2, samples_per_rank=1))
    ratio = flat["fsdp2-equal-samples"].step_s / flat["odc"].step_s

    def always(cell: str, **changes: object) -> Study:
        return flat

    for statement in STATEMENTS:
        if "gain by" in statement.what and statement.published != "peaks at a moderate minibatch":
            ours, holds = statement.check(always)
            assert not holds
            assert ours.count(f"{ratio:.2f}x") == len(re.findall(r": \d", ours))


def test_studies_are_simulated_once() -> None:
    said: list[str] = []
    studies = Studies(1, 0, said.append)
    first = studies("1.5B LongAlign", samples_per_rank=1, ranks=2)
    assert studies("1.5B LongAlign", ranks=2, samples_per_rank=1) is first
    assert len(said) == 1


def test_the_stored_page_has_every_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| (?:yes|\*\*no\*\*, [a-z]) \|$", text, re.MULTILINE)
    assert len(rows) == len(FIGURES) + len(STATEMENTS)
    agree = sum(row.endswith("| yes |") for row in rows)
    assert f"**{agree} of {len(rows)} agree**" in text


def cells_of(line: str) -> tuple[str, ...]:
    """What stands between the bars of a table's row, without bold marks."""
    return tuple(cell.strip().strip("*") for cell in line.strip().strip("|").split("|"))


@pytest.mark.parametrize(
    ("cell", "samples"), [("14B AIME", 2), pytest.param("1.5B LongAlign", 4, marks=pytest.mark.thorough)]
)
def test_figures_on_the_page_are_those_that_simulating_again_gives(
    cell: str, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a cell and two statements, by value, with the minibatches and the seed that the page names."""
    text = PAGE.read_text(encoding="utf-8")
    made = re.search(r"--minibatches (\d+) --seed (\d+)", text)
    assert made is not None
    chosen = tuple(figure for figure in FIGURES if (figure.cell, figure.samples) == (cell, samples))
    quick = tuple(statement for statement in STATEMENTS if statement.what.startswith("fetch of a 7B layer"))
    monkeypatch.setattr("odc.simulate.reproduce.FIGURES", chosen)
    monkeypatch.setattr("odc.simulate.reproduce.STATEMENTS", quick)
    on_page = {cells_of(line)[:3]: cells_of(line)[3:] for line in text.splitlines() if line.startswith("| ")}
    reasons = dict(re.findall(r"^\* ([a-z]): (.*)\.$", text, re.MULTILINE))
    rows = reproduce(int(made[1]), int(made[2]), lambda said: None)
    assert f"{cell} mb{samples}" in {row.what.split(":")[0] for row in rows}
    for row in rows:
        ours, spread, agrees = on_page[row.source, row.what, row.published]
        assert (ours, spread) == (row.ours, row.spread)
        assert agrees == "yes" if row.agrees else reasons[agrees.removeprefix("no**, ")] == row.why
