"""From the runs of a comparison to figures: one dictionary that is written as JSON and printed as one table.

Of every step the median over repeats comes first, then the median, min and max over steps. docs/compare.md describes
every key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from pathlib import Path
from statistics import median
from typing import Any

from odc.experiments.compare import CompareConfig, hosts_of, over_repeats, run_arms
from odc.experiments.device import device_names
from odc.experiments.hosts import HostTeam
from odc.experiments.machine import machine, versions
from odc.experiments.preflight import new_file
from odc.experiments.results import ArmRun
from odc.provenance import begin, json_text
from odc.trace import CATEGORIES, Stat


def compare(
    config: CompareConfig, path: Path, command: Sequence[str], show: Callable[[str], None], team: HostTeam | None = None
) -> tuple[dict[str, Any], dict[str, list[ArmRun]]]:
    """Runs a whole comparison; returns its figures, which can be written to `path`, and its runs by arm.

    Of a `team` the host that leads calls it; the others call `run_arms`.
    """
    begun = begin()
    config.workload.check_extras()
    new_file(path, "json")
    runs = run_arms(config, show, team)
    return report(config, runs, command) | begun.facts(), runs


def report(config: CompareConfig, runs: dict[str, list[ArmRun]], command: Sequence[str]) -> dict[str, Any]:
    """All figures of a comparison, JSON-able."""
    workload, reference = config.workload, runs[config.reference][0].losses
    return {
        "schema": workload.schema,
        "reference": config.reference,
        "arms": {arm: _arm(config, own, reference) for arm, own in runs.items()},
        "job": workload.to_dict(),
        "repeats": config.repeats,
        "skipped_steps": config.skip,
        "hosts": list(hosts_of(runs).values()),
        "machine": machine() | ({"devices": device_names()} if workload.device == "cuda" else {}),
        "versions": versions(),
        "seed": workload.job.seed,
        "command": list(command),
        **workload.facts(),
    }


def write_report(path: Path, figures: dict[str, Any]) -> None:
    """Writes the figures as JSON, replacing the file as a whole; a device, a pipe or a link is written to as it is."""
    if path.exists() and (path.is_symlink() or not path.is_file()):
        path.write_text(json_text(figures))
        return
    beside = path.with_name(f".{path.name}.partial")
    beside.write_text(json_text(figures))
    beside.replace(path)


def _arm(config: CompareConfig, runs: list[ArmRun], reference: list[float]) -> dict[str, Any]:
    measured = [run.measured.steps for run in runs]
    results = [result for run in runs for result in run.results]
    seconds = over_repeats(measured, lambda step: step.step_s)
    return {
        "step_s": Stat.of(seconds).to_dict(),
        "bubble": Stat.of(over_repeats(measured, lambda step: step.bubble)).to_dict(),
        "breakdown": {
            category: Stat.of(over_repeats(measured, methodcaller("mean_s", category))).to_dict()
            for category in CATEGORIES
        },
        "loss": _losses(runs, reference),
        "peak_bytes": max(result.peak_bytes for result in results),
        "held_bytes": max((result.held_bytes or 0 for result in results), default=0) or None,
        "baseline_bytes": min(result.baseline_bytes for result in results),
        "steal": median(known) if (known := [run.steal for run in runs if run.steal is not None]) else None,
        "runs": [_run(run) for run in runs],
        **config.workload.figures(runs, config.skip, seconds),
    }


def _losses(runs: list[ArmRun], reference: list[float]) -> dict[str, Any]:
    gaps = [abs(a - b) for run in runs for a, b in zip(run.losses, reference, strict=True)]
    return {"final": runs[0].losses[-1], "steps": runs[0].losses, "largest_difference": max(gaps)}


def _run(run: ArmRun) -> dict[str, Any]:
    return {
        "step_s": [step.step_s for step in run.measured.steps],
        "bubble": [step.bubble for step in run.measured.steps],
        "steal": run.steal,
    } | {name: [getattr(one, name) for one in run.results] for name in ("peak_bytes", "held_bytes", "baseline_bytes")}
