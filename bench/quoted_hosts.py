"""The table of docs/hosts.md and its picture, from the stored result.

`python -m bench.quoted_hosts` draws the picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

from bench.quoted import Result, best, command, load, note, prose, span
from odc.bench.report import cell, table

PICTURE = Path(__file__).parent.parent / "docs" / "hosts.svg"
_CASE = ("hosts x ranks", "microbatches", "work", "link")
_HEADING = "hosts x ranks, microbatches, link"
_SHOWN = ("odc", "odc-inline", "odc-hybrid")
_RIVALS = ("fsdp2-hybrid", "fsdp2", "gloo")
_WIDTH, _LEFT, _BAR, _GAP = 860, 300, 15, 14
_COLOURS = {  # all else is torch's
    "odc": "#2e7d32",
    "odc-inline": "#3b8a3f",
    "odc-unmarked": "#4c9a4f",
    "odc-bf16": "#64a868",
    "odc-hybrid": "#7fb77f",
    "odc-nixl": "#b5d6b5",
}
_OTHER = "#8fb8de"
_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"
font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#1f2328">
<rect width="{width}" height="{height}" fill="#ffffff"/>"""


def cases(result: Result) -> Iterator[tuple[Result, dict[str, Result]]]:
    """Each case that was measured, as its first row has it, and its rows by arm."""
    for _, group in groupby(result["rows"], key=lambda row: tuple(row[key] for key in _CASE)):
        rows = {row["arm"]: row for row in group}
        yield next(iter(rows.values())), rows


def hosts() -> str:
    """docs/hosts.md: odc beside the fastest of torch's arms in each case, then beside each of them."""
    result = load("hosts")
    lines = []
    for first, rows in cases(result):
        seconds = {arm: row["seconds"] for arm, row in rows.items()}
        theirs = {arm: took for arm, took in seconds.items() if not arm.startswith("odc")}
        rival = best(theirs)
        of_best = {f"`{arm}` of it": f"{seconds[arm] / theirs[rival]:.2f}" if arm in seconds else "-" for arm in _SHOWN}
        of_each = " / ".join(f"{seconds['odc'] / theirs[arm]:.2f}" if arm in theirs else "-" for arm in _RIVALS)
        heading = f"`odc` of {' / '.join(f'`{arm}`' for arm in _RIVALS)}"
        lines.append({_HEADING: _name(first), "best of torch": f"`{rival}`", **of_best, heading: of_each})
    return f"{table(lines)}\n\n" + prose(
        f"Measured on {result['machine']['cores']} cores, hosts as namespaces, medians in turns "
        f"(`{command(result)}`, [all arms, processor time and bytes](../bench/results/hosts.md)). What left a host was "
        f"{span([row['bytes / formula'] for row in result['rows']])} of the formula above. Demo: the model of "
        f"`odc compare --demo`; `odc-inline`: `Settings(prefetch=0, push_overlap=False)`.{note(result)}"
    )


def hosts_simulated() -> str:
    """docs/hosts.md: what the simulator says of each exchange over a limited link that `hosts` quotes."""
    result, lines = load("simulated_hosts"), dict[str, dict[str, str]]()
    arms = list(dict.fromkeys(row["arm"] for row in result["rows"]))
    for row in result["rows"]:
        case = f"{row['hosts x ranks']}, {row['microbatches']}, {row['link']}"
        line = lines.setdefault(case, {_HEADING: case, **{f"`{arm}`": "-" for arm in arms}})
        line[f"`{row['arm']}`"] = f"{row['simulated / measured']:.2f}"
    return f"{table(list(lines.values()))}\n\n" + prose(
        f"*Simulated* time over measured, all arms (`{command(result)}`). Costs of `gloo` and `odc` were taken from "
        "links without limit and stand for the other arms too; "
        f"[more](../bench/results/simulated_hosts.md).{note(result)}"
    )


def _name(row: Result) -> str:
    demo = ", demo" if row["work"] == "demo" else ""
    return f"{row['hosts x ranks']}, {row['microbatches']}, {row['link']}{demo}"


def svg(result: Result | None = None) -> str:
    """Seconds of each arm as bars, case by case."""
    measured, elements, y = load("hosts") if result is None else result, list[str](), 46
    second = (_WIDTH - _LEFT - 70) / max(row["seconds"] for row in measured["rows"])
    title = "Seconds of a minibatch on several hosts (measured)"
    elements.append(f'<text x="12" y="22" font-size="14" font-weight="bold">{title}</text>')
    for first, rows in cases(measured):
        elements.append(f'<text x="12" y="{y + 11}">{escape(_name(first))}</text>')
        for arm, row in rows.items():
            width = row["seconds"] * second
            elements.append(f'<text x="{_LEFT - 8}" y="{y + 11}" text-anchor="end">{escape(arm)}</text>')
            colour = _COLOURS.get(arm, _OTHER)
            elements.append(f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 3}" fill="{colour}"/>')
            elements.append(f'<text x="{_LEFT + width + 5:.1f}" y="{y + 11}">{cell(row["seconds"])}</text>')
            y += _BAR
        y += _GAP
    return "\n".join([_HEAD.format(width=_WIDTH, height=y), *elements, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
    print(f"wrote {PICTURE.name}")
