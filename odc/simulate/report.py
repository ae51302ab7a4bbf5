"""A study as a table, and pictures of sweeps: bubble and speed-up of every arm along each axis."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odc.errors import ConfigError, OdcError, install
from odc.simulate.study import AXES, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table


def study_table(study: Study) -> Table:
    """A rich Table with a row an arm; `mb` are microbatches of whole samples a rank, `GB out` leave a node a step.

    Raises OdcError without rich.
    """
    try:
        from rich import box
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise OdcError(f"printing a table needs rich: {install('cli')}") from error
    scenario = study.scenario
    title = (  # holds the user's paths, so it is no markup
        f"simulated: {scenario.model} on {scenario.ranks} x {scenario.machine},\n"
        f"{scenario.samples_per_rank} samples a rank, lengths like {scenario.lengths}"
    )
    table = Table(
        title=Text(title, style="table.title"),
        caption=f"means of {scenario.minibatches} minibatches, speed-ups over {study.arms[0].arm}; whole samples\n"
        f"take at least {study.bound_s:.3g} s; bubble = waiting for ranks + for transfers;\n"
        "mb: microbatches of whole samples a rank",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 0, 0, 1),  # all columns fit into 80
    )
    table.add_column("arm", no_wrap=True)
    crosses = scenario.cluster().nodes > 1
    for head in ("step, s", "speed-up", "bubble", "waiting", "transfer", "mb", *["GB out"] * crosses):
        table.add_column(head, justify="right", no_wrap=True)
    for row in study.arms:
        shares = (f"{share:.1%}" for share in (row.bubble, row.waiting, row.transfer))
        table.add_row(
            row.arm,
            _figure(row.step_s),
            f"{row.speedup:.3f}",
            *shares,
            f"{row.microbatches:.1f}",
            *[_figure(row.node_bytes / 1e9)] * crosses,
        )
    return table


def _figure(value: float) -> str:
    """Three digits, and all those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


#: Blues and greens for on-demand arms, warm colours for collectives, dashes for published planners.
_STYLE: dict[str, tuple[str, str]] = {
    "fsdp2-localsort": ("#b07aa1", ":"),
    "fsdp2-equal-samples": ("#e15759", ":"),
    "fsdp2": ("#e15759", "-"),
    "fsdp2-padded": ("#f28e2b", "--"),
    "fsdp2-resident": ("#9c755f", "-."),
    "fsdp2-hybrid": ("#ff9da7", "-."),
    "odc-localsort": ("#86bcb6", ":"),
    "odc-equal-samples": ("#59a14f", ":"),
    "odc-equal": ("#59a14f", "--"),
    "odc": ("#4e79a7", "-"),
    "odc-split": ("#b6408a", "-"),
    "odc-dynamic": ("#17395c", "--"),
    "odc-hybrid": ("#76b7b2", "-."),
}
_MARKERS = "os^Dvp*XPh"


def require_drawable(path: Path) -> None:
    """Raises ConfigError where matplotlib is missing or writes no picture of the kind that the suffix names."""
    figure = _empty_figure()
    figure.suptitle("with a text, which some kinds need other programs for")
    try:
        figure.savefig(io.BytesIO(), format=path.suffix[1:])
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"picture: cannot write {path}: {error}") from error


def _empty_figure(**options: Any) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"drawing needs matplotlib: {install('plot')}") from error
    return Figure(**options)


def draw_sweeps(path: str | Path, sweeps: Mapping[str, Sequence[Study]], title: str) -> None:
    """Write a picture (format by suffix) with one column for each axis: bubbles above, speed-ups below.

    `sweeps` maps an axis to studies by its rising values. Raises ConfigError without matplotlib.
    """
    figure = _empty_figure(figsize=(4.2 * len(sweeps) + 0.6, 7.4), layout="constrained")
    grid = figure.subplots(2, len(sweeps), squeeze=False, sharey="row")
    for column, (axis, studies) in enumerate(sweeps.items()):
        values = [getattr(one.scenario, axis) for one in studies]
        upper, lower = grid[0][column], grid[1][column]
        for number, figures in enumerate(studies[0].arms):
            colour, line = _STYLE.get(figures.arm, ("#777777", "-"))
            line_of = [one[figures.arm] for one in studies]
            # Of lines that coincide each is thinner than the one below it.
            over = 1 - number / len(studies[0].arms)
            look: dict[str, Any] = {"color": colour, "linestyle": line, "linewidth": 1 + 3 * over, "label": figures.arm}
            look |= {"marker": _MARKERS[number % len(_MARKERS)], "markersize": 3 + 6 * over}
            upper.plot(range(len(values)), [100 * f.bubble for f in line_of], **look)
            lower.plot(range(len(values)), [f.speedup for f in line_of], **look)
        for panel in (upper, lower):
            panel.set_xticks(range(len(values)), [_short(value) for value in values])
            panel.grid(color="#d5dade", linewidth=0.6)
            panel.spines[["top", "right"]].set_visible(False)
        lower.set_xlabel(AXES[axis])
    grid[0][0].set_ylabel("simulated bubble, %")
    grid[0][0].set_ylim(bottom=0)
    base = next(iter(sweeps.values()))[0].arms[0].arm
    grid[1][0].set_ylabel(f"simulated speed-up over {base}")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, handlelength=3.5)
    figure.suptitle(title, fontsize=12, parse_math=False)
    figure.savefig(path, dpi=130)


def _short(value: float) -> str:
    return f"{value // 1024:g}K" if value >= 1024 and value % 1024 == 0 else f"{value:g}"
