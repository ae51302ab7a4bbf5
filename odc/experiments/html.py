"""The report of a comparison as one self-contained HTML file: table, pictures and settings, for a browser or a mail."""

from __future__ import annotations

import base64
import importlib.resources
import io
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from odc.errors import OdcError, install
from odc.experiments.table import on_hosts

if TYPE_CHECKING:
    from rich.table import Table

# Lines that coincide must still be told apart, so each arm has a marker, dashes and width of its own beside its colour.
_COLOURS = ("#27496d", "#d8431f", "#1b9e77", "#b07c00", "#8e63b8", "#4d9de0", "#7a5230", "#c2185b")
_MARKERS = "os^Dvp*X"
_DASHES = ("-", "--", "-.", ":")


def require_template_engine() -> None:
    """Raise OdcError, naming the extra, where a report could not be written; call it before any work starts."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise OdcError(f"an HTML report needs jinja2 and matplotlib: {install('plot')}") from error


def write_html(path: Path, figures: Mapping[str, Any], tables: Sequence[Table], timeline: Path | None) -> None:
    """Write the report to `path`: `figures` as `odc.experiments.report.compare` returns them, `tables` made of them.

    `timeline` is a PNG that is embedded. Raises OdcError without jinja2 or matplotlib.
    """
    require_template_engine()
    import jinja2

    template = importlib.resources.files("odc.experiments").joinpath("templates/report.html.jinja").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    text = environment.from_string(template).render(
        title=f"odc: {', '.join(figures['arms'])}",
        command=shlex.join(figures["command"]),
        facts=_facts(figures),
        tables=[_table(table) for table in tables],
        pictures=_pictures(figures, timeline),
        settings=[(name, value) for name, value in figures["job"].items() if name != "arm" and value not in (None, "")],
    )
    path.write_text(text, encoding="utf-8")


def _facts(figures: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    machine = dict(figures["machine"])
    machine["memory"] = f"{machine.pop('memory_bytes') / 2**30:.1f} GiB"
    where = "; host 0" if on_hosts(figures) else ""
    about = ", ".join(f"{name} {value}" for name, value in machine.items() if value not in (None, []))
    load = figures["load_1min"]["begin"]
    begun = f"Measured on {figures['date']}, commit {figures['commit'] or 'of an installed package'}"
    return f"{begun}{where}; {about}; {versions}; load of the machine at the start {load}."


def _table(table: Table) -> dict[str, Any]:
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    rows = [
        {"cells": cells, "last": row.end_section}
        for cells, row in zip(zip(*columns, strict=True), table.rows, strict=True)
    ]
    headings = [str(column.header) for column in table.columns]
    return {"title": table.title or "", "caption": table.caption or "", "headings": headings, "rows": rows}


def _pictures(figures: Mapping[str, Any], timeline: Path | None) -> list[dict[str, str]]:
    repeats = figures["repeats"]
    over = (
        f"; a line is the median of {repeats} runs, its band reaches from the least to the most" if repeats > 1 else ""
    )
    pictures = [
        {
            "title": "Every step",
            "source": _embedded("image/svg+xml", _steps_chart(figures)),
            "caption": f"Steps from {figures['skipped_steps'] + 1} on, in the order of training{over}. Arms run the "
            "same samples in the same step. A bubble is missing where the arm's spans do not tell it.",
        }
    ]
    if timeline is not None:
        caption = "What each rank did when. Every panel starts at 0 and all share one scale."
        if on_hosts(figures):
            caption += " Ranks stand by host; times of all hosts are on the clock of host 0."
        source = _embedded("image/png", timeline.read_bytes())
        pictures.append({"title": "Timeline", "source": source, "caption": caption})
    return pictures


def _embedded(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _steps_chart(figures: Mapping[str, Any]) -> bytes:
    """SVG: seconds and bubble of every counted step, a line an arm."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained", facecolor="white")
    FigureCanvasSVG(figure)
    for axes, key, label, factor in zip(
        figure.subplots(1, 2), ("step_s", "bubble"), ("step [s]", "bubble, measured [%]"), (1, 100), strict=True
    ):
        for number, (name, arm) in enumerate(figures["arms"].items()):
            runs = [run[key] for run in arm["runs"]]
            _line(axes, number, name, [[factor * value for value in run] for run in runs], figures["skipped_steps"] + 1)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(color="#d5dade", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=6, frameon=False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()


def _line(axes: Any, number: int, name: str, runs: Sequence[Sequence[float]], first: int) -> None:
    steps = list(zip(*runs, strict=True))
    at = range(first, first + len(steps))
    colour = _COLOURS[number % len(_COLOURS)]
    thin = min(number, 5)  # of lines that coincide each is thinner than the one below it
    style: dict[str, Any] = {"marker": _MARKERS[number % len(_MARKERS)], "linestyle": _DASHES[number % len(_DASHES)]}
    style |= {"markersize": 9 - thin, "linewidth": 3.2 - 0.4 * thin}
    axes.plot(at, [median(step) for step in steps], color=colour, label=name, **style)
    if len(runs) > 1:
        axes.fill_between(at, list(map(min, steps)), list(map(max, steps)), color=colour, alpha=0.15, linewidth=0)
