"""The README's diagram of one step under FSDP2 and under odc, docs/step.svg, which `bench.readme` writes.

A drawing of six made-up samples, not a measurement. Both halves use the same samples and the same time axis.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).parent.parent / "docs" / "step.svg"
COLLECTIVE = ((6, 2), (3, 5), (2, 3))  # seconds of each rank's microbatches, equal counts
ON_DEMAND = ((6,), (5, 2), (3, 3, 2))  # the same six samples, dealt out over the whole minibatch
PASSES = (
    ("forward", 1 / 6),
    ("forward", 1 / 6),
    ("backward", 1 / 3),
    ("backward", 1 / 3),
)  # of two layers
OPTIMIZER_S = 0.5

WIDTH, HEIGHT = 860, 392
LEFT, SECOND, BAR, PITCH = 74, 64.0, 26, 40
COLOURS = {
    "forward": "#8fb8de",
    "backward": "#3f78b5",
    "wait": "url(#waiting)",
    "optimizer": "#e0a030",
    "meeting": "#b3261e",
    "transfer": "#2e7d32",
    "text": "#1f2328",
}


@dataclass
class Drawing:
    """Elements of the picture, in the order in which they are painted."""

    elements: list[str] = field(default_factory=list)

    def box(self, kind: str, begin: float, end: float, top: float) -> None:
        """One span of a rank, from `begin` to `end` seconds."""
        x, width = LEFT + begin * SECOND, (end - begin) * SECOND
        self.elements.append(
            f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[kind]}" '
            'stroke="#ffffff" stroke-width="1"/>'
        )

    def line(self, second: float, top: float, bottom: float, width: float) -> None:
        """A moment at which all ranks meet."""
        x = LEFT + second * SECOND
        self.elements.append(
            f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="{COLOURS["meeting"]}" '
            f'stroke-width="{width:g}"/>'
        )

    def arrow(self, second: float, top: float, *, up: bool) -> None:
        """A transfer of one rank: a fetch comes down to its bar, a push leaves upward."""
        x, tip, foot = LEFT + second * SECOND, *((top - 8, top - 2) if up else (top - 2, top - 8))
        path = f"M{x - 4:.1f} {foot:.1f}L{x + 4:.1f} {foot:.1f}L{x:.1f} {tip:.1f}Z"
        self.elements.append(f'<path d="{path}" fill="{COLOURS["transfer"]}"/>')

    def text(self, x: float, y: float, said: str, style: str = "") -> None:
        self.elements.append(f'<text x="{x:.1f}" y="{y:.1f}"{style}>{escape(said)}</text>')


def under_fsdp2(drawing: Drawing, top: float) -> None:
    """Every rank waits for the slowest one at every layer of every microbatch."""
    now, edges = 0.0, [0.0]
    for microbatch in zip(*COLLECTIVE, strict=True):
        for kind, share in PASSES:
            end = now + share * max(microbatch)
            for rank, seconds in enumerate(microbatch):
                drawing.box(kind, now, now + share * seconds, top + rank * PITCH)
                if seconds < max(microbatch):
                    drawing.box("wait", now + share * seconds, end, top + rank * PITCH)
            now = end
            edges.append(now)
    _optimizer(drawing, now, top)
    for edge in edges:
        drawing.line(edge, top - 5, top + 2 * PITCH + BAR + 5, 2)


def under_odc(drawing: Drawing, top: float) -> None:
    """Each rank runs its own microbatches; the only meeting is at the end."""
    step = float(max(sum(own) for own in ON_DEMAND))
    for rank, own in enumerate(ON_DEMAND):
        now, bar = 0.0, top + rank * PITCH
        for seconds in own:
            for kind, share in PASSES:
                drawing.box(kind, now, now + share * seconds, bar)
                drawing.arrow(now + 0.08, bar, up=False)
                now += share * seconds
                if kind == "backward":
                    drawing.arrow(now - 0.08, bar, up=True)
        if now < step:
            drawing.box("wait", now, step, bar)
    _optimizer(drawing, step, top)
    drawing.line(step, top - 5, top + 2 * PITCH + BAR + 5, 3)


def _optimizer(drawing: Drawing, now: float, top: float) -> None:
    for rank in range(3):
        drawing.box("optimizer", now, now + OPTIMIZER_S, top + rank * PITCH)
        drawing.text(14, top + rank * PITCH + 18, f"rank {rank}")


def _legend(drawing: Drawing, y: float) -> None:
    names = (("forward", 88), ("backward", 98), ("wait", 84), ("optimizer", 102))
    x = 14.0
    for kind, width in names:
        drawing.elements.append(f'<rect x="{x:.1f}" y="{y - 10}" width="14" height="12" fill="{COLOURS[kind]}"/>')
        drawing.text(x + 19, y, "waiting" if kind == "wait" else kind)
        x += width
    drawing.elements.append(
        f'<line x1="{x + 7:.1f}" y1="{y - 12}" x2="{x + 7:.1f}" y2="{y + 3}" stroke="{COLOURS["meeting"]}" '
        'stroke-width="3"/>'
    )
    drawing.text(x + 17, y, "all ranks meet")
    x += 130 + 7
    for up, said, width in ((False, "fetch a layer's shards", 172), (True, "push its gradients", 0)):
        drawing.arrow((x - LEFT) / SECOND, y + 1, up=up)
        drawing.text(x + 10, y, said)
        x += width


def svg() -> str:
    """The picture, on a light card of its own so that it reads on dark pages too."""
    drawing = Drawing()
    bold = ' font-weight="600" font-size="14"'
    titles = (
        "FSDP2: every layer of every microbatch is a collective; all wait for the slowest rank",
        "odc: a rank fetches and pushes when it gets there; all meet once, at the end of the step",
    )
    for top, title, half in zip((46, 222), titles, (under_fsdp2, under_odc), strict=True):
        drawing.text(14, top - 20, title, bold)
        half(drawing, top)
    _legend(drawing, 374)
    return "\n".join([_HEAD, *drawing.elements, "</svg>", ""])


_HEAD = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"
 font-family="Helvetica, Arial, sans-serif" font-size="13" fill="{COLOURS["text"]}" role="img">
<title>One training step of three ranks under FSDP2 and under odc (a drawing, not a measurement)</title>
<defs><pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" fill="#f3f4f6"/><line x1="0" y1="0" x2="0" y2="6" stroke="#9aa0a6" stroke-width="2"/>
</pattern></defs>
<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" fill="#ffffff" stroke="#d0d7de"/>"""
