"""docs/changes.svg: what steps on two hosts send and take, over reading shards whole. `bench.readme` draws it."""

from __future__ import annotations

from pathlib import Path

from bench.quotes import figures_of
from bench.svg import document

PICTURE = Path(__file__).parent.parent / "docs" / "changes.svg"
_PANELS = {"out": "bytes out of a host", "limited": "seconds over 1 Gbit", "free": "seconds, link not limited"}
_COLOURS = ("#1b5e20", "#66bb6a", "#c8e6c9")  # by rate
_LEFT, _PANEL, _BAR, _TOP = 90, 250, 10, 70
_VALUE = 'font-size="9" stroke="white" stroke-width="3" paint-order="stroke"'  # readable where the line crosses it


def svg() -> str:
    """The picture: a panel for each measure, in each a group of bars for each arm, a bar for each learning rate."""
    figures = figures_of("changes")
    arms, rates = figures["values"], figures["rates"].split(" / ")
    height = _TOP + len(arms) * (len(rates) * _BAR + 12)
    elements = [_text(12, 22, "A step on two hosts, over reading shards whole (measured)", 'font-size="14"')]
    for at, rate in enumerate(rates):
        x = _LEFT + 120 * at
        elements += [_bar(x, 32, 10, _COLOURS[at]), _text(x + 15, 41, f"AdamW at {float(rate):.0e}")]
    for number, (key, title) in enumerate(_PANELS.items()):
        left = _LEFT + number * _PANEL
        elements.append(_text(left, _TOP - 10, title, 'font-weight="bold"'))
        scale = (_PANEL - 60) / max(1.0, *(value for measures in arms.values() for value in measures[key]))
        elements.append(f'<path d="M{left + scale:.1f} {_TOP - 4}V{height - 8}" stroke="#999" stroke-dasharray="3 3"/>')
        for row, (arm, measures) in enumerate(arms.items()):
            y = _TOP + row * (len(rates) * _BAR + 12)
            if not number:
                elements.append(_text(_LEFT - 8, y + 18, arm, 'text-anchor="end"'))
            for at, value in enumerate(measures[key]):
                elements.append(_bar(left, y + at * _BAR, value * scale, _COLOURS[at]))
                elements.append(_text(left + value * scale + 4, y + at * _BAR + 8, f"{value:.2f}", _VALUE))
    return document(_LEFT + len(_PANELS) * _PANEL, height, elements)


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" {more}>{text}</text>'


def _bar(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR - 2}" fill="{colour}"/>'
