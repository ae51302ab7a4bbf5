"""From the runs of a multimodal comparison to figures: one dictionary, written as JSON and printed as one table.

Chose the rules of `odc compare`: of every step the median over repeats first, then median, min and max over steps.
docs/multimodal.md says what every key means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from odc.errors import OdcError
from odc.experiments.machine import machine, versions
from odc.experiments.multimodal.compare import CompareConfig, Run
from odc.experiments.multimodal.minibatch import PHASES, Phase
from odc.experiments.multimodal.phases import PhaseTime
from odc.trace import CATEGORIES, Stat

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = "odc-train-mm-1"
_MIB = float(1 << 20)


def report(config: CompareConfig, runs: dict[str, list[Run]], command: Sequence[str]) -> dict[str, Any]:
    """All figures, JSON-able."""
    first = config.arms[0]
    return {
        "schema": SCHEMA,
        "reference": first,
        "arms": {arm: _arm(config, own, runs[first][0].losses) for arm, own in runs.items()},
        "job": config.config.job.to_dict(),
        "per_node": config.config.per_node,
        "repeats": config.repeats,
        "skipped_steps": config.skip,
        "machine": machine(),
        "versions": versions(),
        "seed": config.config.job.seed,
        "command": list(command),
    }


def _arm(config: CompareConfig, runs: list[Run], reference: list[float]) -> dict[str, Any]:
    seconds = _over_repeats(runs, lambda run, at: run.measured.steps[at].step_s)
    steps = runs[0].results[0].steps[config.skip :]
    gaps = [abs(a - b) for run in runs for a, b in zip(run.losses, reference, strict=True)]
    return {
        "step_s": Stat.of(seconds).to_dict(),
        "tokens_per_s": sum(step.tokens for step in steps) / sum(seconds),
        "useful_flops_per_s": sum(step.flops for step in steps) / sum(seconds),
        "bubble": Stat.of(_over_repeats(runs, lambda run, at: run.measured.steps[at].bubble)).to_dict(),
        "breakdown": {
            category: Stat.of(
                _over_repeats(runs, lambda run, at, name=category: run.measured.steps[at].mean_s(name))  # type: ignore[misc]
            ).to_dict()
            for category in CATEGORIES
        },
        "phases": {phase: _phase(config, runs, phase) for phase in PHASES},
        "plan_s": median(step.plan_s for run in runs for result in run.results for step in result.steps),
        "waited_s": median(s.waited_s for run in runs for result in run.results for s in result.steps[config.skip :]),
        "loss": {"final": runs[0].losses[-1], "steps": runs[0].losses, "largest_difference": max(gaps)},
        "peak_bytes": max(result.peak_bytes for run in runs for result in run.results),
        "baseline_bytes": min(result.baseline_bytes for run in runs for result in run.results),
        "exchange_bytes": max(result.exchange_bytes for run in runs for result in run.results),
        "steal": median(known) if (known := [run.steal for run in runs if run.steal is not None]) else None,
        "runs": [[step.step_s for step in run.measured.steps] for run in runs],
    }


def _phase(config: CompareConfig, runs: list[Run], phase: Phase) -> dict[str, Any]:
    def over(figure: Callable[[PhaseTime], float]) -> dict[str, float]:
        return Stat.of(_over_repeats(runs, lambda run, at: figure(run.phases[at][phase]))).to_dict()

    counts = [step.phases[phase] for result in runs[0].results for step in result.steps[config.skip :]]
    steps = len(runs[0].measured.steps)
    real, computed = sum(count.real for count in counts), sum(count.computed for count in counts)
    return {
        "busy_s": over(lambda time: fmean(time.busy_s.values())),
        "busiest_s": over(lambda time: max(time.busy_s.values())),
        "bubble": over(lambda time: time.bubble),
        "items": sum(count.items for count in counts) / steps,
        "padding": 1.0 - real / computed if computed else 0.0,
        "bytes_within_nodes": sum(count.near for count in counts) / steps,
        "bytes_across_nodes": sum(count.far for count in counts) / steps,
    }


def _over_repeats(runs: list[Run], figure: Callable[[Run, int], float]) -> list[float]:
    """Of every counted step, the median over repeats."""
    return [median(figure(run, at) for run in runs) for at in range(len(runs[0].measured.steps))]


def table(figures: dict[str, Any]) -> Table:
    """A rich table of what `report` returned, a row an arm. Raises OdcError when rich is missing."""
    try:
        from rich import box
        from rich.table import Table
    except ImportError as error:
        raise OdcError("printing a comparison needs rich: pip install 'odc-fsdp[cli]'") from error
    job = figures["job"]
    made = Table(
        title=f"{job['ranks']} ranks, {figures['per_node']} a node (declared), {job['minibatch_size']} examples a step",
        caption=_caption(figures),
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
        collapse_padding=True,
        show_edge=False,
    )
    made.add_column("", no_wrap=True)
    for heading, _ in _COLUMNS:
        made.add_column(heading, justify="right", no_wrap=True)
    transport = ""
    for name, arm in figures["arms"].items():
        if transport and not name.startswith(transport):
            made.add_section()
        transport = name.partition("/")[0]
        made.add_row(name, *(cell(arm) for _, cell in _COLUMNS))
    return made


def _moved(arm: dict[str, Any], key: str) -> str:
    return f"{sum(phase[key] for phase in arm['phases'].values()) / _MIB:.1f}"


def _share(phase: Phase, key: str) -> Callable[[dict[str, Any]], str]:
    def cell(arm: dict[str, Any]) -> str:
        value = arm["phases"][phase][key]
        return f"{value['median'] if isinstance(value, dict) else value:.0%}"

    return cell


_COLUMNS: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("step\ns", lambda arm: f"{arm['step_s']['median']:.2f}"),
    ("tok\n/s", lambda arm: f"{arm['tokens_per_s']:,.0f}"),
    ("GF\n/s", lambda arm: f"{arm['useful_flops_per_s'] / 1e9:.1f}"),
    ("bub-\nble", lambda arm: f"{arm['bubble']['median']:.0%}"),
    ("\nimg", _share("image", "bubble")),
    ("\naud", _share("audio", "bubble")),
    ("\nllm", _share("llm", "bubble")),
    ("pad\naud", _share("audio", "padding")),
    ("MiB\nnear", lambda arm: _moved(arm, "bytes_within_nodes")),
    ("\nfar", lambda arm: _moved(arm, "bytes_across_nodes")),
    ("buf\nMiB", lambda arm: f"{arm['exchange_bytes'] / _MIB:.0f}"),
    ("peak\nMiB", lambda arm: f"{(arm['peak_bytes'] - arm['baseline_bytes']) / _MIB:.0f}"),
    ("loss\ngap", lambda arm: f"{arm['loss']['largest_difference']:.0e}"),
]


def _caption(figures: dict[str, Any]) -> str:
    counted = figures["job"]["steps"] - figures["skipped_steps"]
    repeats = f", each the median of {figures['repeats']} runs" if figures["repeats"] > 1 else ""
    return (
        f"Medians over {counted} steps{repeats}. GF/s: useful GFLOP/s, without padding, all ranks. Bubbles are "
        "measured: of the step, and of each phase (1 - mean busy / the longest rank's time in it). MiB: exchanged in a "
        "step by all ranks, within and across declared nodes; buf: most that one rank needs for a move, or its arena. "
        "Peak: of the largest rank, above what it held before the model was built. "
        f"The loss gap is the largest of any step, to {figures['reference']}."
    )
