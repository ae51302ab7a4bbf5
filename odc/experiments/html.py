"""The report of a comparison as one self-contained HTML file: tables, pictures and settings, for a browser or a mail.

rich lays out the text as it does in a terminal; the pictures are embedded below it.
"""

from __future__ import annotations

import base64
import html
import io
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from odc.experiments.table import on_hosts

if TYPE_CHECKING:
    from rich.table import Table

PAGE_WIDTH = 120  # characters
# Lines that coincide must stay distinct, so each arm has a marker, dashes and width of its own beside its colour.
_COLOURS = ("#27496d", "#d8431f", "#1b9e77", "#b07c00", "#8e63b8", "#4d9de0", "#7a5230", "#c2185b")
_MARKERS = "os^Dvp*X"
_DASHES = ("-", "--", "-.", ":")


def write_html(path: Path, figures: Mapping[str, Any], tables: Sequence[Table], timeline: Path | None) -> None:
    """Write the report to `path`: `figures` as `odc.experiments.report.compare` returns them, `tables` made of them.

    `timeline` is a PNG that is embedded. Needs rich and matplotlib.
    """
    from rich.console import Console
    from rich.table import Table

    settings = Table(title="Settings", box=None, show_header=False)
    for name, value in figures["job"].items():
        if name != "arm" and value not in (None, ""):
            settings.add_row(name, str(value))
    console = Console(file=io.StringIO(), record=True, width=PAGE_WIDTH, markup=False, highlight=False)
    for part in (shlex.join(figures["command"]), _facts(figures), *tables, settings):
        console.print(part)
        console.line()
    title = f"<title>{html.escape('odc: ' + ', '.join(figures['arms']))}</title>"
    page = console.export_html().replace("<head>", f"<head>\n{title}", 1)
    path.write_text(page.replace("</body>", "\n".join([*_pictures(figures, timeline), "</body>"])), encoding="utf-8")


def _facts(figures: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    machine = dict(figures["machine"])
    machine["memory"] = f"{machine.pop('memory_bytes') / 2**30:.1f} GiB"
    where = "; host 0" if on_hosts(figures) else ""
    about = ", ".join(f"{name} {value}" for name, value in machine.items() if value not in (None, []))
    load = figures["load_1min"]["begin"]
    begun = f"Measured on {figures['date']}, commit {figures['commit'] or 'of an installed package'}"
    return f"{begun}{where}; {about}; {versions}; load of the machine at the start {load}."


def _pictures(figures: Mapping[str, Any], timeline: Path | None) -> Iterator[str]:
    """The pictures as HTML, each with its caption."""
    over = ""
    if (repeats := figures["repeats"]) > 1:
        over = f"; a line is the median of {repeats} runs, its band reaches from the least to the most"
    yield _picture(
        "image/svg+xml",
        _steps_chart(figures),
        f"Steps from {figures['skipped_steps'] + 1} on, in the order of training{over}. Arms run the same samples in "
        "the same step. A bubble is missing where the arm's spans do not show it.",
    )
    if timeline is not None:
        caption = "What each rank did when. Every panel starts at 0 and all share one scale."
        if on_hosts(figures):
            caption += " Ranks stand by host; times of all hosts are on the clock of host 0."
        yield _picture("image/png", timeline.read_bytes(), caption)


def _picture(kind: str, content: bytes, caption: str) -> str:
    source = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    return f'<p><img alt="" style="max-width: 100%" src="{source}"><br>{html.escape(caption)}</p>'


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
