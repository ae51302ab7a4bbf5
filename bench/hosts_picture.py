"""docs/hosts.svg: seconds of each arm on several hosts as bars, from the stored result. `bench.readme` draws it."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

from bench.stored import cases, load
from bench.svg import document
from odc.bench.report import cell

PICTURE = Path(__file__).parent.parent / "docs" / "hosts.svg"
_WIDTH, _LEFT, _BAR, _GAP = 860, 300, 15, 14
_ODC, _TORCH = "#2e7d32", "#8fb8de"


def svg() -> str:
    """The picture."""
    measured, elements, y = load("hosts"), list[str](), 46
    second = (_WIDTH - _LEFT - 70) / max(row["seconds"] for row in measured["rows"])
    title = "Seconds of a minibatch (measured): hosts x ranks of each, microbatches, link"
    elements.append(f'<text x="12" y="22" font-size="14" font-weight="bold">{title}</text>')
    for case, rows in cases(measured):
        elements.append(f'<text x="12" y="{y + 11}">{escape(case)}</text>')
        for arm, row in rows.items():
            width = row["seconds"] * second
            elements.append(f'<text x="{_LEFT - 8}" y="{y + 11}" text-anchor="end">{escape(arm)}</text>')
            colour = _ODC if arm.startswith("odc") else _TORCH
            elements.append(f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 3}" fill="{colour}"/>')
            elements.append(f'<text x="{_LEFT + width + 5:.1f}" y="{y + 11}">{cell(row["seconds"])}</text>')
            y += _BAR
        y += _GAP
    return document(_WIDTH, y, elements)
