"""bench/results/reproduction.md: every published ratio beside ours, with what was assumed, agreeing or not.

Made by `odc simulate --reproduce bench/results/reproduction.md`, which states its rule and assumptions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from odc.simulate.lengths import lengths_named
from odc.simulate.published import CELLS, FIGURES, Figure
from odc.simulate.statements import STATEMENTS
from odc.simulate.study import Study, study

NEAR_SPEEDUP, NEAR_BUBBLE = 0.05, 0.05


@dataclass(frozen=True)
class Row:
    """One published figure or statement and ours."""

    source: str  # where it stands
    what: str  # cell and arms
    published: str
    ours: str
    spread: str  # least and most of ours when the assumed lengths vary; "" for statements
    agrees: bool  # by the rule above
    why: str  # what explains a disagreement


class Studies:
    """Studies of the cells, each simulated once."""

    def __init__(self, minibatches: int, seed: int, said: Callable[[str], None]) -> None:
        self._changes = {"minibatches": minibatches, "seed": seed}
        self._said = said
        self._known: dict[tuple[str, tuple[tuple[str, object], ...]], Study] = {}

    def __call__(self, cell: str, **changes: object) -> Study:
        """The study of a cell with some fields changed."""
        key = cell, tuple(sorted(changes.items()))
        if key not in self._known:
            self._said(f"{cell} {', '.join(f'{name} {value}' for name, value in changes.items())}")
            self._known[key] = study(CELLS[cell].with_(**(self._changes | changes)))
        return self._known[key]


def reproduce(minibatches: int, seed: int, said: Callable[[str], None]) -> list[Row]:
    """All rows, figures first. `said` is told what is being simulated."""
    studies = Studies(minibatches, seed, said)
    rows = [_row(figure, studies) for figure in FIGURES]
    for statement in STATEMENTS:
        ours, agrees = statement.check(studies)
        rows.append(Row(statement.source, statement.what, statement.published, ours, "", agrees, statement.why))
    return rows


def _row(figure: Figure, studies: Studies) -> Row:
    near, show = (NEAR_BUBBLE, "{:.1%}") if figure.kind == "bubble" else (NEAR_SPEEDUP, "{:.2f}x")
    high = figure.low if figure.high is None else figure.high
    value = _value(figure, studies)
    agrees = figure.low - near <= value <= high + near
    longest = lengths_named(CELLS[figure.cell].lengths).longest
    varied = ({"sigma": 0.5}, {"sigma": 1.1}, {"max_length": longest // 2})
    values = [value, *(_value(figure, studies, **one) for one in varied)]
    inside = min(values) - near <= high and figure.low <= max(values) + near
    why = _LENGTHS if inside else figure.why
    published = show.format(figure.low) + (f" to {show.format(high)}" if figure.high is not None else "")
    spread = f"{show.format(min(values))}-{show.format(max(values))}"
    return Row(figure.source, _what(figure), published, show.format(value), spread, agrees, why)


def _value(figure: Figure, studies: Studies, **varied: object) -> float:
    free = {"machine": "a100-free"} if figure.free else {}
    done = studies(figure.cell, samples_per_rank=figure.samples, **free, **varied)
    if figure.kind == "bubble":
        return done[figure.arm].bubble
    return done[figure.base].step_s / done[figure.arm].step_s


def _what(figure: Figure) -> str:
    if figure.kind == "bubble":
        what = f"bubble of {figure.arm}"
    else:
        what = f"{figure.arm} over {figure.base}"
    return f"{figure.cell} mb{figure.samples}: {what}"


def page(rows: list[Row], minibatches: int, seed: int) -> str:
    """The page as markdown; the reason for a row that does not agree stands below the table, by its letter."""
    good, near = sum(row.agrees for row in rows), sum(not row.agrees and row.why == _LENGTHS for row in rows)
    (other,) = {
        f"{cell.efficiency:.0%} of peak FLOPs, recomputation {'on' if cell.checkpointing else 'off'}, packing ratio "
        f"{cell.packing_ratio:g}"
        for cell in CELLS.values()
    }
    lines = [
        "# Published ratios and ours",
        "",
        "```",
        f"odc simulate --reproduce bench/results/reproduction.md --minibatches {minibatches} --seed {seed}",
        "```",
        "",
        "Everything under *simulated* is simulated; nothing was run. One rule for all rows, fixed before the first",
        f"run: a speed-up agrees within {NEAR_SPEEDUP:.2f}, a bubble within {100 * NEAR_BUBBLE:.0f} percentage points,",
        "a statement if it holds.",
        "",
        f"**{good} of {len(rows)} agree**; {near} more lie within what other lengths give. No assumption was changed",
        "to make a row agree.",
        "",
        "## Assumptions",
        "",
        "| cell | model | machine | lengths |",
        "|---|---|---|---|",
    ]
    for name, cell in CELLS.items():
        lines.append(_cells(name, cell.model, f"{cell.ranks} x {cell.machine}", cell.lengths))
    lines += ["", f"* In all cells {other}.", *_NOTES, "", "## Rows", ""]
    lines += ["| source | what | published | simulated | other lengths | agrees |", "|---|---|---|---|---|---|"]
    reasons = list(dict.fromkeys(row.why for row in rows if not row.agrees))
    for row in rows:
        agrees = "yes" if row.agrees else f"**no**, {letter(reasons.index(row.why))}"
        lines.append(_cells(row.source, row.what, row.published, row.ours, row.spread, agrees))
    lines += ["", "## Why not, as far as we can tell", ""]
    lines += [f"* {letter(number)}: {why}." for number, why in enumerate(reasons)]
    return "\n".join([*lines, "", *_NOT_REPRODUCED, ""])


def letter(number: int) -> str:
    """How the page names a reason: a, b, c and so on."""
    return chr(ord("a") + number)


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


_LENGTHS = "the lengths decide: the published figure lies within what we get when the assumed ones vary"
_NOTES = (
    "* Lengths are drawn from the distributions of [simulate.md](../../docs/simulate.md#lengths): published means and",
    "  cuts, assumed widths (and the cut of AIME). AMD does not name its data; LongAlign is taken. *Other lengths*:",
    "  the least and the most with widths of 0.5 and 1.1, and with samples cut at half the length.",
    "* Numbers of GPUs are assumed where the source is silent. mb4 means 4 samples a rank in a minibatch; AMD's global",
    "  batch sizes are divided by its GPUs.",
    "* [Arms](../../docs/compare.md#the-arms) by their published names: `fsdp2-equal-samples` is Collective LB-Micro,",
    "  `odc-equal-samples` ODC LB-Micro, `odc` ODC LB-Mini, `fsdp2-padded` AMD's NCCL_pad.",
    "* The paper's bubbles are its packer's estimates, without communication; ours are of free links.",
    "* Sources: the paper (text and figures), its tables and appendix as *reviews* quote them, AMD's table and the",
    "  re-run in its README.",
)
_NOT_REPRODUCED = (
    "## Not set beside anything",
    "",
    "Absolute throughput (reviews quote a unit in which the figures cannot be right), memory (figure 13), convergence",
    "(tests compare losses of real runs), AMD's communicator set-up (6%), prefetch overhead and gradient spikes.",
)
