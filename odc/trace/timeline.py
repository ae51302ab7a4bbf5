"""A picture of what each rank did when: one row for each rank, one panel for each arm, one time axis for all of them.

Every panel starts at 0 and all share one scale, so a shorter panel *is* a faster arm, and a barrier shows as waits that
end on one vertical line. Rows of a host stand together, where there are several. A row's upper band is the training
thread, as the breakdown counts it; the thin strip below it shows the background lanes, which are not counted. The
colours differ in lightness as well as in hue, so that colour-blind readers can distinguish them. Nothing global of
matplotlib is used: any thread of a job may draw. Between minibatches a row is blank, except for what a death has cost.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from odc.errors import OdcError, TraceError, install
from odc.trace.breakdown import Breakdown, breakdown, own_steps
from odc.trace.cover import cover, marked_epochs
from odc.trace.spans import (
    COMPUTE,
    FETCH,
    GIVEN_UP,
    IDLE,
    MAIN,
    MICROBATCH,
    OPTIMIZER,
    PUSH,
    RECOVERIES,
    RECOVERY,
    WAIT,
    Span,
    is_piece,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final[Mapping[str, str]] = {
    COMPUTE: "#a9c6e3",
    OPTIMIZER: "#27496d",
    FETCH: "#1b9e77",
    PUSH: "#e6ab02",
    WAIT: "#d8431f",
    IDLE: "#eceef0",
}
#: Of what a death costs, between minibatches.
RECOVERY_COLOURS: Final[Mapping[str, str]] = {GIVEN_UP: "#c9b7a5", RECOVERY: "#3a3a3a"}
#: Of the pieces of split samples, a colour a sample.
PIECE_COLOURS: Final = ("#8e63b8", "#c78bc9", "#5b3f8c", "#e0b3dd", "#a2478f")
_SHADES: Final = (COLOURS[COMPUTE], "#8db3d8")  # of compute, alternating
_INK, _SOFT_INK = "#20262c", "#66707a"

# Inches.
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 13.0, 0.9, 0.75, 0.86, 0.62
_HEADER, _GAP = 0.68, 0.14
_HOSTS = 0.55  # that hosts' names take at the left
_HOST_GAP = 0.4  # rows between two hosts
_DPI = 150


@dataclass(frozen=True)
class _Panel:
    """One arm, ready to draw: times in nanoseconds after the first drawn step's start."""

    title: str
    figures: Breakdown
    origin: int
    end: int
    steps: tuple[tuple[int, int, int], ...]  # epoch, start, end
    pieces: Mapping[int, Sequence[Span]]
    starts: Mapping[int, Sequence[int]]  # of microbatches
    split: Mapping[tuple[int, str], str]  # colour by epoch and unit of a split sample
    background: Mapping[int, Sequence[Span]]
    recoveries: Mapping[int, Sequence[Span]]
    rows: Mapping[int, float]  # where each rank's row lies, from the top, in rows
    hosts: Mapping[int, int]  # of each rank; empty where there is one host

    @property
    def height(self) -> float:
        """Of all rows, in rows."""
        return max(self.rows.values()) + 1


def draw(
    path: str | os.PathLike[str],
    panels: Sequence[tuple[str, Mapping[int, Sequence[Span]]]],
    *,
    epochs: Iterable[int] | None = None,
    skip: int = 0,
    source: str = "measured",
    passes: Sequence[tuple[str, str]] = (),
    headlines: Mapping[str, str] | None = None,
    hosts: Mapping[int, int] | None = None,
) -> None:
    """Draw a PNG. Raises TraceError without panels or for one without a complete minibatch among `epochs`, and OdcError
    without matplotlib.

    Args:
        path: where to write it; the folder must exist.
        panels: title and spans by rank of each arm, from top to bottom.
        epochs: minibatches to draw, as far as a panel has them; None draws the last two that all its ranks recorded.
        skip: leading epochs that the bubble printed over each panel leaves out; it counts all others, drawn or not.
        source: how the times were obtained ("measured", "emulated" or "simulated"); printed beside the bubble.
        passes: (label, colour) of compute in microbatch 0, 1, ..., for jobs in which a microbatch's index has a
            meaning. Without them two shades alternate.
        headlines: what is printed over the panel of each title, as `headline` makes it, where its figures are not those
            of the spans given here.
        hosts: number of each rank's host; spans of several must be on one clock.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OdcError(f"drawing a timeline needs matplotlib: {install('plot')}") from error
    if not panels:
        raise TraceError("a timeline needs at least one panel")
    wanted = None if epochs is None else frozenset(epochs)
    several = hosts if hosts is not None and len(set(hosts.values())) > 1 else {}
    prepared = [_prepare(title, spans_by_rank, wanted, skip, several) for title, spans_by_rank in panels]
    # Inches: 2 ranks must not become slabs, and 32 must fit on a page.
    row = max(0.2, min(0.46, 4.2 / max(panel.height for panel in prepared)))
    heights = [row * panel.height for panel in prepared]
    left = _LEFT + (_HOSTS if several else 0.0)
    height = _TOP + sum(heights) + len(panels) * _HEADER + (len(panels) - 1) * _GAP + _BOTTOM
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    span_ns = max(panel.end - panel.origin for panel in prepared)
    scale, unit = (1e6, "ms") if span_ns < 2e9 else (1e9, "s")
    top = height - _TOP
    for panel, rows in zip(prepared, heights, strict=True):
        top -= _HEADER
        box = (left / _WIDTH, (top - rows) / height, (_WIDTH - left - _RIGHT) / _WIDTH, rows / height)
        axes = figure.add_axes(box)
        _draw_rows(axes, panel, scale, [colour for _, colour in passes] or _SHADES)
        headline = (headlines or {}).get(panel.title) or _headline_of(panel.figures, source)
        _draw_frame(axes, panel, scale, span_ns / scale, rows, headline)
        _draw_hosts(axes, panel, _LEFT / (_WIDTH - left - _RIGHT), row)
        axes.tick_params(axis="x", labelbottom=panel is prepared[-1], length=4 if panel is prepared[-1] else 0)
        top -= rows + _GAP
    axes.set_xlabel(f"time since the first drawn step began [{unit}]", fontsize=10, color=_INK, labelpad=6)
    _draw_legend(figure, prepared, left, height, dict(passes))
    figure.savefig(os.fspath(path), format="png")


def _headline_of(figures: Breakdown, source: str) -> str:
    return headline(source, figures.bubble.median, figures.step_s.median, len(figures.steps))


def headline(source: str, bubble: float, step_s: float, count: int, repeats: int = 1) -> str:
    """What stands over a panel: medians over `count` minibatches, each the median of `repeats` runs."""
    duration = f"{step_s:.2f} s" if step_s >= 1 else f"{step_s * 1e3:.3g} ms"
    over = f"median of {count} minibatch{'es' * (count > 1)}" + f" in {repeats} runs" * (repeats > 1)
    return f"{source} bubble {bubble:.1%}    step {duration}    ({over})"


def _prepare(
    title: str,
    spans_by_rank: Mapping[int, Sequence[Span]],
    wanted: frozenset[int] | None,
    skip: int,
    hosts: Mapping[int, int],
) -> _Panel:
    figures = breakdown(spans_by_rank, skip=skip)
    drawn = figures.steps[-2:] if wanted is None else [step for step in figures.steps if step.epoch in wanted]
    if not drawn:
        raise TraceError(f"{title}: all ranks recorded none of the requested minibatches")
    marked = marked_epochs(spans_by_rank)
    pieces, starts, background, recoveries = {}, {}, {}, {}
    split: dict[tuple[int, str], str] = {}
    for rank, spans in sorted(spans_by_rank.items()):
        steps = own_steps(spans)
        windows = [steps[step.epoch] for step in drawn]
        whole = [(step.start_ns, step.end_ns) for step in drawn]
        inside = [span for span in spans if span.end_ns > whole[0][0] and span.start_ns < whole[-1][1]]
        pieces[rank] = _clip(cover(inside, marked), windows)
        starts[rank] = [span.start_ns for span in _clip(inside, windows) if span.category == MICROBATCH]
        for span in (span for span in pieces[rank] if span.category == COMPUTE and is_piece(span)):
            split.setdefault((span.epoch, span.unit), PIECE_COLOURS[len(split) % len(PIECE_COLOURS)])
        background[rank] = _clip((span for span in inside if span.lane != MAIN and span.category in COLOURS), whole)
        between = (span for span in inside if span.category in RECOVERIES)
        recoveries[rank] = _clip(between, [(whole[0][0], whole[-1][1])])
    origin, end = min(step.start_ns for step in drawn), max(step.end_ns for step in drawn)
    brackets = tuple((step.epoch, step.start_ns, step.end_ns) for step in drawn)
    rows = _rows(spans_by_rank, hosts)
    return _Panel(title, figures, origin, end, brackets, pieces, starts, split, background, recoveries, rows, hosts)


def _rows(ranks: Iterable[int], hosts: Mapping[int, int]) -> dict[int, float]:
    """Where each rank's row lies, from the top: by host and rank, with a gap between hosts."""
    ordered = sorted(ranks, key=lambda rank: (hosts.get(rank, 0), rank))
    numbers = sorted({hosts.get(rank, 0) for rank in ordered})
    return {rank: at + _HOST_GAP * numbers.index(hosts.get(rank, 0)) for at, rank in enumerate(ordered)}


def _clip(spans: Iterable[Span], windows: Sequence[tuple[int, int]]) -> list[Span]:
    """The parts of spans that lie inside the windows."""
    parts = []
    for span in spans:
        for begin, end in windows:
            if span.start_ns < end and span.end_ns > begin:
                parts.append(span._replace(start_ns=max(span.start_ns, begin), end_ns=min(span.end_ns, end)))
    return parts


def _draw_rows(axes: Axes, panel: _Panel, scale: float, shades: Sequence[str]) -> None:
    from matplotlib.collections import LineCollection, PolyCollection

    bars: dict[str, list[tuple[float, float, float, float]]] = {}  # colour -> left, top, width, height

    def add(colour: str, start: int, end: int, top: float, height: float) -> None:
        bars.setdefault(colour, []).append(((start - panel.origin) / scale, top, (end - start) / scale, height))

    strips = any(panel.background.values())
    top, height = (-0.4, 0.62) if strips else (-0.39, 0.78)
    for rank, row in panel.rows.items():
        for _, start, end in panel.steps:
            add(COLOURS[IDLE], start, end, row + top, height)
        for piece in panel.pieces[rank]:
            # Compute outside of any microbatch (-1) gets the first shade.
            shade = shades[max(0, piece.microbatch) % len(shades)]
            shade = panel.split.get((piece.epoch, piece.unit), shade)
            colour = shade if piece.category == COMPUTE else COLOURS[piece.category]
            add(colour, piece.start_ns, piece.end_ns, row + top, height)
        for span in panel.recoveries[rank]:
            add(RECOVERY_COLOURS[span.category], span.start_ns, span.end_ns, row + top, height)
        for span in panel.background[rank]:
            add(COLOURS[span.category], span.start_ns, span.end_ns, row + 0.26, 0.14)
    for colour, boxes in bars.items():
        corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in boxes]
        axes.add_collection(PolyCollection(corners, facecolors=colour, edgecolors="none", linewidths=0), autolim=False)
    lines = [
        [((start - panel.origin) / scale, row + top), ((start - panel.origin) / scale, row + top + height)]
        for rank, row in panel.rows.items()
        for start in panel.starts[rank]
    ]
    axes.add_collection(LineCollection(lines, colors="white", linewidths=1.1, capstyle="butt"), autolim=False)


def _draw_frame(axes: Axes, panel: _Panel, scale: float, width: float, inches: float, headline: str) -> None:
    """Limits, rank names, busy shares, minibatch brackets and the two headlines of one panel."""
    ranks, few = list(panel.rows), len(panel.rows) <= 16
    axes.set_xlim(0, width)
    axes.set_ylim(panel.height - 0.5, -0.5)
    shown = ranks if few else ranks[::4]
    axes.set_yticks([panel.rows[rank] for rank in shown], [f"rank {rank}" for rank in shown])
    axes.tick_params(axis="y", length=0, labelsize=10 if few else 9, labelcolor=_INK, pad=6)
    axes.tick_params(axis="x", labelsize=10, color=_SOFT_INK, labelcolor=_INK)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", color="#d5dade", linewidth=0.6)
    axes.set_axisbelow(True)
    figures = panel.figures
    right: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "ha": "right", "fontsize": 9}
    for rank in shown:
        axes.text(1.05, panel.rows[rank], f"{figures.busy(rank).median:.0%}", color=_SOFT_INK, **right)
    above = 1 + 0.13 / inches  # one line over the rows, in axes height
    head = 1 + 0.44 / inches
    place: dict[str, Any] = {"transform": axes.transAxes, "va": "center"}
    axes.text(1.05, above, "busy", color=_SOFT_INK, ha="right", fontsize=9, **place)
    axes.text(0, head, panel.title, color=_INK, ha="left", fontsize=13, fontweight="bold", **place)
    axes.text(1, head, headline, color=_INK, ha="right", fontsize=11, **place)
    for epoch, start, end in panel.steps:
        left, stop = (start - panel.origin) / scale, (end - panel.origin) / scale
        axes.plot([left, stop], [above - 0.1 / inches] * 2, transform=axes.get_xaxis_transform(), color=_SOFT_INK,
                  linewidth=1.2, clip_on=False, marker="|", markersize=6)  # fmt: skip
        axes.text((left + stop) / 2, above, f"minibatch {epoch}", transform=axes.get_xaxis_transform(),
                  color=_SOFT_INK, fontsize=9, ha="center", va="bottom")  # fmt: skip


def _draw_hosts(axes: Axes, panel: _Panel, left: float, row: float) -> None:
    """The name of each host beside its rows, `left` of them in axes widths, and a line along them; a row in inches."""
    beside = axes.get_yaxis_transform()
    for host in sorted(set(panel.hosts.values())):
        own = [at for rank, at in panel.rows.items() if panel.hosts.get(rank) == host]
        top, bottom = own[0] - 0.4, own[-1] + 0.4
        turned = 90 if (bottom - top) * row > 0.6 else 0
        axes.plot([-left] * 2, [top, bottom], transform=beside, color=_SOFT_INK, linewidth=1.2, clip_on=False)
        axes.text(-left - 0.006, (top + bottom) / 2, f"host {host}", transform=beside, rotation=turned, color=_INK,
                  fontsize=10 if turned else 8, ha="right", va="center")  # fmt: skip


def _draw_legend(
    figure: Figure, panels: Sequence[_Panel], left: float, height: float, compute: Mapping[str, str]
) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=colour) for colour in compute.values()]
    labels, notes = list(compute), [f"a white line begins a {'pass' if compute else 'microbatch'}"]
    if not compute:
        handles, labels = [_side_by_side(_SHADES)], [COMPUTE]
        notes.insert(0, "the shade of compute alternates with every microbatch")
    if any(panel.split for panel in panels):
        notes.insert(0, "each split sample has a colour")
        handles.append(_side_by_side(PIECE_COLOURS[:3]))
        labels.append("pieces of split samples")
    for category, colour in COLOURS.items():
        if category != COMPUTE:
            handles.append(Patch(facecolor=colour))
            labels.append(category)
    found = {span.category for panel in panels for spans in panel.recoveries.values() for span in spans}
    for category in RECOVERIES:
        if category in found:
            handles.append(Patch(facecolor=RECOVERY_COLOURS[category]))
            labels.append(category)
    figure.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(left / _WIDTH, 1 - 0.16 / height), ncols=len(handles),
        handler_map={tuple: HandlerTuple(None, pad=0.0)}, frameon=False, fontsize=11, labelcolor=_INK,
        handlelength=1.3, handleheight=1.0, columnspacing=1.8, borderpad=0, borderaxespad=0,
    )  # fmt: skip
    uncounted = ["background threads (the thin strip)"] * any(any(panel.background.values()) for panel in panels)
    uncounted += ["given-up minibatches and recoveries"] * bool(found)
    uncounted += ["time between minibatches (blank)"] * any(len(panel.steps) > 1 for panel in panels)
    lines = ["; ".join(notes), f"not counted: {', '.join(uncounted)}" if uncounted else ""]
    figure.text(
        left / _WIDTH, 1 - 0.4 / height, "\n".join(lines), va="top", fontsize=9, color=_SOFT_INK, linespacing=1.4
    )


def _side_by_side(colours: Sequence[str]) -> tuple[Any, ...]:
    """One entry of the legend that shows several colours."""
    from matplotlib.patches import Patch

    return tuple(Patch(facecolor=colour) for colour in colours)
