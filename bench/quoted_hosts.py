"""The table of docs/hosts.md and its picture, from the stored result.

`python -m bench.quoted_hosts` draws the picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

from bench.quoted import Result, load, note, prose
from odc.bench.report import cell, table

PICTURE = Path(__file__).parent.parent / "docs" / "hosts.svg"
_CASE = ("hosts x ranks", "microbatches", "work", "link")
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
    """docs/hosts.md: odc beside the first arm of each case."""
    result = load("hosts")
    lines = [
        {
            "hosts x ranks, microbatches, link": _name(first) + ended,
            "against": f"`{first['arm']}`",
            "time": f"{rows[arm]['of the first']:.2f}",
            "CPU": f"{rows[arm]['CPU of the first']:.2f}",
            "bytes / formula": f"{rows[arm]['bytes / formula']:.2f}",
        }
        for first, rows in cases(result)
        for arm, ended in (("odc", ""), ("odc-inline", ", inline"))
        if arm in rows
    ]
    return f"{table(lines)}\n\n" + prose(
        f"Measured on {result['machine']['cores']} cores, hosts as namespaces, medians in turns "
        f"(`{result['command'].partition(' --results')[0].removeprefix('OMP_NUM_THREADS=1 ')}`, "
        f"[all arms](../bench/results/hosts.md)). Demo: the model of `odc compare --demo`; inline: with "
        f"`Settings(prefetch=0, push_overlap=False)`.{note(result, 4)}"
    )


def hosts_simulated() -> str:
    """docs/hosts.md: what the simulator says of the exchanges that `hosts` quotes, at 1 Gbit/s without a delay."""
    result, lines = load("simulated_hosts"), dict[str, dict[str, str]]()
    for row in result["rows"]:
        if row["arm"] in ("gloo", "odc") and row["link"] == "1gbit" and row["hosts x ranks"] != "2 x 1":
            case = f"{row['hosts x ranks']}, {row['microbatches']}"
            line = lines.setdefault(case, {"simulated / measured time": case})
            line[f"`{row['arm']}`"] = f"{row['simulated / measured']:.2f}"
    made = result["command"].partition(" --results")[0].removeprefix("OMP_NUM_THREADS=1 ")
    return f"{table(list(lines.values()))}\n\n" + prose(
        f"Costs were measured over links without limit (`{made}`, [all arms](../bench/results/simulated_hosts.md))."
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
