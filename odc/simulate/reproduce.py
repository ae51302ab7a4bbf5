"""docs/reproduction.md: every published ratio beside ours, with what was assumed, agreeing or not.

One rule for all rows, fixed before the first run: a speed-up agrees within 0.05, a bubble within 5 percentage points, a
statement if it holds. Made by `odc simulate --reproduce docs/reproduction.md`.
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
    """One published figure or statement and ours.

    Args:
        source: where it stands.
        what: cell and arms.
        published, ours: as text.
        spread: least and most of ours when the assumed lengths vary; "" for statements.
        agrees: by the rule above.
        why: what explains a disagreement.
    """

    source: str
    what: str
    published: str
    ours: str
    spread: str
    agrees: bool
    why: str


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
    spread = f"{show.format(min(values))} to {show.format(max(values))}"
    return Row(figure.source, _what(figure), published, show.format(value), spread, agrees, why)


def _value(figure: Figure, studies: Studies, **varied: object) -> float:
    free = {"machine": "a100-free"} if figure.free else {}
    done = studies(figure.cell, samples_per_rank=figure.samples, **free, **varied)
    if figure.kind == "bubble":
        return done[figure.arm].bubble
    return done[figure.base].step_s / done[figure.arm].step_s


def _what(figure: Figure) -> str:
    if figure.kind == "bubble":
        what = f"bubble of {figure.arm}" + (", compute and waiting only" if figure.free else "")
    else:
        what = f"{figure.arm} over {figure.base}"
    return f"{figure.cell}, {figure.samples} a rank: {what}"


def page(rows: list[Row], minibatches: int, seed: int) -> str:
    """The page as markdown."""
    good, near = sum(row.agrees for row in rows), sum(not row.agrees and row.why == _LENGTHS for row in rows)
    lines = [
        "# Published ratios and ours",
        "",
        f"Made by `odc simulate --reproduce docs/reproduction.md --minibatches {minibatches} --seed {seed}`; do not",
        "edit. Everything under *simulated* is simulated, nothing was run. One rule for all rows, fixed before the",
        f"first run: a speed-up agrees within {NEAR_SPEEDUP:.2f}, a bubble within {100 * NEAR_BUBBLE:.0f} percentage",
        "points, a statement if it holds.",
        "",
        f"**{good} of {len(rows)} agree**; {near} more lie within what other lengths give. The reasons that we see for",
        "all that do not agree stand below. No assumption was changed to make a row agree.",
        "",
        "## Assumptions",
        "",
        "| cell | model | machine | lengths | other |",
        "|---|---|---|---|---|",
    ]
    for name, cell in CELLS.items():
        other = f"{cell.efficiency:.0%} of peak FLOPs, recomputation {'on' if cell.checkpointing else 'off'}, "
        other += f"packing ratio {cell.packing_ratio:g}"
        lines.append(f"| {name} | {cell.model} | {cell.ranks} x {cell.machine} | {cell.lengths} | {other} |")
    lines += ["", *_NOTES, "", "## Rows", ""]
    lines += ["| source | what | published | simulated | other lengths | agrees |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(_cells(row.source, row.what, row.published, row.ours, row.spread, _YES if row.agrees else _NO))
    lines += ["", "## Why not, as far as we can tell", ""]
    reasons: dict[str, list[Row]] = {}
    for row in rows:
        if not row.agrees:
            reasons.setdefault(row.why, []).append(row)
    for why, own in reasons.items():
        lines.append(f"* {why[0].upper()}{why[1:]}.")
        lines += [f"  * {row.what}: {row.published}, simulated {row.ours}" for row in own]
    return "\n".join([*lines, "", *_NOT_REPRODUCED, ""])


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


_YES, _NO = "yes", "**no**"
_LENGTHS = "the lengths decide: the published figure lies within what we get when the assumed ones vary"
_NOTES = (
    "* Lengths are drawn from the named distributions of `odc.simulate.lengths`. Means and cuts are published; widths",
    "  (and the cut of AIME) are assumed. AMD does not name its data; LongAlign is taken. *Other lengths* is the least",
    "  and the most that we get with widths of 0.5 and 1.1, and with samples cut at half the length.",
    "* Numbers of GPUs for each model are assumed where the source does not say: 8 for 1.5B and 7B, 16 for 14B, 32 for",
    "  32B. Minibatch n (mb n) means n samples a rank; AMD's global batch sizes are divided by its GPUs.",
    "* Arms are those of docs/compare.md. By their published names, `fsdp2-equal-samples` is Collective LB-Micro,",
    "  `odc-equal-samples` ODC LB-Micro, `odc` ODC LB-Mini, and `fsdp2-padded` is AMD's NCCL_pad. Of the published",
    "  LB-Micro only the constraint of equal sample counts is known; the planner under it is ours.",
    "* Bubbles of the paper are estimates of its packer, without communication; they are set beside a machine whose",
    "  links cost nothing.",
)
_NOT_REPRODUCED = (
    "## Not set beside anything",
    "",
    "* Absolute throughput: reviews quote a unit in which the figures cannot be right. Memory (figure 13): not",
    "  simulated. Convergence: odc's tests compare losses of real runs instead.",
    "* AMD's communicator set-up (6%), prefetch overhead, gradient spikes: properties of one implementation.",
)
