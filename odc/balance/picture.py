"""A picture of a plan: one row a rank, its pieces and microbatches one after the other, and the lower bound."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from odc.balance.plan import Plan
from odc.errors import OdcError, install

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHADES, _IDLE, _INK = ("#2f6fa7", "#6aa3d5"), "#e9ecef", "#1f2933"
_PIECES = ("#8e63b8", "#c78bc9", "#5b3f8c", "#e0b3dd", "#a2478f")  # of split samples, a colour a sample
_WIDTH, _DPI = 10.0, 120


def draw_plan(plan: Plan, path: str | os.PathLike[str], title: str = "plan") -> None:
    """Draw a PNG; the folder must exist. Raises OdcError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OdcError(f"drawing a plan needs matplotlib: {install('plot')}") from error
    ranks = len(plan.ranks)
    rows = ranks * max(0.004, min(0.4, 8.0 / ranks))
    figure = Figure(figsize=(_WIDTH, rows + 1.5), dpi=_DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    longest = plan.longest or 1.0
    height = 0.8 if ranks <= 64 else 1.0
    _boxes(axes, [(0.0, rank, longest) for rank in range(ranks)], _IDLE, height, "idle")
    starts = plan.split_starts
    for number, (split, at) in enumerate(zip(plan.splits, starts, strict=True)):
        pieces = [(at, float(rank), cost) for rank, cost in zip(split.ranks, split.costs, strict=True)]
        label = "pieces of split samples" if number == 0 else None
        _boxes(axes, pieces, _PIECES[number % len(_PIECES)], height, label)
    shades: tuple[list[tuple[float, float, float]], ...] = ([], [])
    for rank, costs in enumerate(plan.costs):
        start = plan.split_ends[rank]
        for m, cost in enumerate(costs):
            shades[m % 2].append((start, rank, cost))
            start += cost
    for boxes, shade, label in zip(shades, _SHADES, ("microbatches", "every second one"), strict=True):
        _boxes(axes, boxes, shade, height, label if boxes else None)
    axes.axvline(plan.bound, color="#c2410c", linewidth=1.2, label=f"lower bound (gap {plan.gap:.2%})")
    axes.set(
        xlim=(0, longest * 1.01),
        ylim=(ranks - 0.5, -0.5),
        xlabel="predicted cost [units of the cost function]",
        ylabel="rank",
    )
    axes.set_title(
        f"{title}: predicted bubble {plan.bubble:.1%} per minibatch, {plan.bubble_per_microbatch:.1%} per microbatch",
        color=_INK,
        loc="left",
        fontsize=11,
    )
    axes.locator_params(axis="y", integer=True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside lower right", ncols=5, fontsize=9, frameon=False)
    figure.savefig(os.fspath(path), format="png")


def _boxes(
    axes: Axes, boxes: Sequence[tuple[float, float, float]], colour: str, height: float, label: str | None = None
) -> None:
    """Rectangles from (left, row, width)."""
    from matplotlib.collections import PolyCollection

    low, high = -height / 2, height / 2
    corners = [[(x, y + low), (x + w, y + low), (x + w, y + high), (x, y + high)] for x, y, w in boxes]
    bars = PolyCollection(corners, facecolors=colour, edgecolors="none", linewidths=0, label=label)
    axes.add_collection(bars, autolim=False)
