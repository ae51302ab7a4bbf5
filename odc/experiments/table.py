"""The figures of a comparison as one table: a column an arm, a row a figure, so that it fits an 80-column terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from odc.errors import OdcError, install
from odc.provenance import other_work
from odc.trace import CATEGORIES

if TYPE_CHECKING:
    from rich.table import Table

_MIB = float(1 << 20)
_LABELS, _CELL = 20, 10  # characters of the first column, and of a usual cell
_ROOMY = 4  # arms up to which there is room for margins


def tables(figures: dict[str, Any], width: int = 80) -> list[Table]:
    """As `table`, in as many tables as keep each within `width` characters; arms stay in order."""
    parts: list[dict[str, Any]] = [{}]
    for name, arm in figures["arms"].items():
        longer = [*parts[-1], name]
        between = 1 if len(longer) > _ROOMY else 3
        if parts[-1] and _LABELS + sum(max(len(one), _CELL) + between for one in longer) > width:
            parts.append({})
        parts[-1][name] = arm
    made = [table({**figures, "arms": part}) for part in parts]
    for one in made[:-1]:
        one.caption = None
    return made


def empty_table(title: str, caption: str, headings: Iterable[str], **layout: Any) -> Table:
    """A rich table with a nameless first column and no rows. Raises OdcError when rich is missing."""
    try:
        from rich import box
        from rich.table import Table
    except ImportError as error:
        raise OdcError(f"printing a comparison needs rich: {install('cli')}") from error
    made = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, **layout)
    made.add_column("", no_wrap=True)
    for heading in headings:
        made.add_column(heading, justify="right", no_wrap=True)
    return made


def table(figures: dict[str, Any]) -> Table:
    """A rich table of what `odc.experiments.report.report` returned. Raises OdcError when rich is missing."""
    arms = figures["arms"]
    wide = len(arms) > _ROOMY
    made = empty_table(_title(figures), _caption(figures), arms, padding=(0, 0 if wide else 1), show_edge=not wide)
    for row in _rows(arms):
        if row is None:
            made.add_section()
        else:
            made.add_row(row[0], *(row[1](arm) for arm in arms.values()))
    return made


def _rows(arms: Mapping[str, dict[str, Any]]) -> list[tuple[str, Callable[[dict[str, Any]], str]] | None]:
    """Label and cell of each row that these arms have figures for; None between two groups of rows."""
    groups: list[list[tuple[str, str, Callable[[dict[str, Any]], str]]]] = [
        [
            ("samples/s", "total", lambda arm: f"{arm['total']['samples_per_s']:.2f}"),
            ("tokens/s", "total", lambda arm: f"{arm['total']['tokens_per_s']:,.0f}"),
            ("step, s", "step_s", lambda arm: f"{arm['step_s']['median']:.2f}"),
            ("  from-to", "step_s", lambda arm: f"{arm['step_s']['min']:.2f}-{arm['step_s']['max']:.2f}"),
            ("rollout, s", "rollout_s", lambda arm: f"{arm['rollout_s']['median']:.2f}"),
        ],
        [
            ("bubble, measured", "bubble", lambda arm: f"{arm['bubble']['median']:.1%}"),
            ("  from-to", "bubble", lambda arm: f"{arm['bubble']['min'] * 100:.1f}-{arm['bubble']['max']:.1%}"),
            ("  plan's prediction", "plan", lambda arm: f"{arm['plan']['bubble']:.1%}"),
            ("  any plan's bound", "plan", lambda arm: f"{arm['plan']['bound']:.1%}"),
        ],
        [(f"{category}, ms", "breakdown", _milliseconds(category)) for category in CATEGORIES],
        [
            ("peak memory, MiB", "peak_bytes", lambda arm: f"{(arm['peak_bytes'] - arm['baseline_bytes']) / _MIB:.0f}"),
            ("  between passes", "held_bytes", between_passes),
        ],
        [
            ("final loss", "loss", lambda arm: f"{arm['loss']['final']:.6f}"),
            ("  largest gap", "loss", lambda arm: f"{arm['loss']['largest_difference']:.1e}"),
            ("final reward", "reward", lambda arm: f"{arm['reward']['final']:.3f}"),
        ],
        [("steal by the host", "steal", lambda arm: "-" if arm["steal"] is None else f"{arm['steal']:.1%}")],
    ]
    rows: list[tuple[str, Callable[[dict[str, Any]], str]] | None] = []
    for group in groups:
        rows += [(label, cell) for label, key, cell in group if all(key in arm for arm in arms.values())]
        rows.append(None)
    return rows[:-1]


def _milliseconds(category: str) -> Callable[[dict[str, Any]], str]:
    return lambda arm: f"{arm['breakdown'][category]['median'] * 1e3:,.0f}"


def between_passes(arm: dict[str, Any]) -> str:
    """MiB that the arm holds between two microbatches, above what was there before its model."""
    if arm["held_bytes"] is None:
        return "-"
    return f"{(arm['held_bytes'] - arm['baseline_bytes']) / _MIB:.0f}"


def _title(figures: dict[str, Any]) -> str:
    job = figures["job"]
    if "prompts" in job:
        return f"{job['ranks']} ranks, {job['prompts']} prompts of {job['group']} responses a step"
    return (
        f"{job['ranks']} ranks{on_hosts(figures)}, {job['minibatch_size']} samples a step, cap {job['max_tokens']} "
        f"tokens, {job['precision']}{', on CUDA' if job['device'] == 'cuda' else ''}{_slowed(job)}"
    )


def on_hosts(figures: Mapping[str, Any]) -> str:
    """How many hosts the ranks were on, if on several."""
    count = len(set(figures.get("hosts", ())))
    return f" on {count} hosts" if count > 1 else ""


def _slowed(job: dict[str, Any]) -> str:
    if not job.get("slow"):
        return ""
    named = " and ".join("rank {} slowed {}x".format(*entry.split(":")) for entry in job["slow"].split(","))
    return f"; {named} (emulated: it sleeps after every microbatch)"


def medians_over(figures: dict[str, Any]) -> str:
    """What the figures are medians of, as a caption begins, and whether the machine had other work."""
    counted = figures["job"]["steps"] - figures["skipped_steps"]
    busy = other_work(figures)
    repeats = f", each the median of {figures['repeats']} runs" if figures["repeats"] > 1 else ""
    return f"Medians over {counted} step{'s'[: counted != 1]}{repeats}.{f' {busy}' if busy else ''}"


def _caption(figures: dict[str, Any]) -> str:
    on_cuda = (
        " On CUDA spans are of the device's compute stream; the fsdp2 arms' wait ends when the last rank's stream "
        "comes to the collective. Memory is torch's allocator's and the heaps'."
    )
    return (
        f"{medians_over(figures)} Bubble and ms are measured, means over ranks. Memory is the largest "
        "rank's, above what it held before the model was built; between passes: between two microbatches of the first "
        f"step that has two. The loss gap is to {figures['reference']}. Steal: cores' time that the host of a virtual "
        f"machine gave to others while the arm ran.{on_cuda if figures['job'].get('device') == 'cuda' else ''}"
    )
