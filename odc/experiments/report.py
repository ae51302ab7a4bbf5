"""From the runs of a comparison to figures: one dictionary that is written as JSON and printed as one table.

Chose to take, of every step, the median over repeats first and then the median, min and max over steps: steps differ in
work by design, repeats only by noise. Medians of categories need not add up to the median step; docs/compare.md says
what every key means.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from operator import methodcaller
from pathlib import Path
from statistics import fmean, median
from typing import Any

from odc.arms import ArmName
from odc.experiments.compare import CompareConfig, Run
from odc.experiments.device import can_time, device_names
from odc.experiments.machine import machine, versions
from odc.experiments.results import StepRecord
from odc.trace import CATEGORIES, EpochBreakdown, Stat

SCHEMA = "odc-compare-1"


def report(config: CompareConfig, runs: dict[ArmName, list[Run]], command: Sequence[str]) -> dict[str, Any]:
    """All figures of a comparison, JSON-able; the keys are documented in docs/compare.md."""
    reference = runs[config.reference][0].losses
    return {
        "schema": SCHEMA,
        "reference": config.reference,
        "arms": {arm: _arm(config, arm, own, reference) for arm, own in runs.items()},
        "job": config.job.to_dict(),
        "repeats": config.repeats,
        "skipped_steps": config.skip,
        "machine": machine() | ({"devices": device_names()} if config.job.device == "cuda" else {}),
        "versions": versions(),
        "seed": config.job.seed,
        "command": list(command),
    }


def write_report(path: Path, figures: dict[str, Any]) -> None:
    """Writes the figures as JSON, replacing the file as a whole."""
    beside = path.with_name(f".{path.name}.partial")
    beside.write_text(json.dumps(figures, indent=1) + "\n")
    beside.replace(path)


def _arm(config: CompareConfig, arm: ArmName, runs: list[Run], reference: list[float]) -> dict[str, Any]:
    measured, timed = [run.measured.steps for run in runs], can_time(config.job, arm)
    seconds = _over_repeats(measured, lambda step: step.step_s)
    steps = runs[0].results[0].steps[config.skip :]
    samples, tokens = sum(step.samples for step in steps), sum(step.tokens for step in steps)
    return {
        "step_s": Stat.of(seconds).to_dict(),
        "samples_per_s": Stat.of(s.samples / t for s, t in zip(steps, seconds, strict=True)).to_dict(),
        "tokens_per_s": Stat.of(s.tokens / t for s, t in zip(steps, seconds, strict=True)).to_dict(),
        "total": {
            "seconds": sum(seconds),
            "samples_per_s": samples / sum(seconds),
            "tokens_per_s": tokens / sum(seconds),
        },
        "bubble": Stat.of(_over_repeats(measured, lambda step: step.bubble)).to_dict() if timed else None,
        "breakdown": {
            category: Stat.of(_over_repeats(measured, methodcaller("mean_s", category))).to_dict() if timed else None
            for category in CATEGORIES
        },
        "loss": _losses(runs, reference),
        "peak_bytes": max(result.peak_bytes for run in runs for result in run.results),
        "held_bytes": max((result.held_bytes or 0 for run in runs for result in run.results), default=0) or None,
        "baseline_bytes": min(result.baseline_bytes for run in runs for result in run.results),
        "plan": _plan(steps),
        "steal": median(known) if (known := [run.steal for run in runs if run.steal is not None]) else None,
        "runs": [_run(run, timed) for run in runs],
    }


def _over_repeats(
    measured: Sequence[Sequence[EpochBreakdown]], figure: Callable[[EpochBreakdown], float]
) -> list[float]:
    """Of every step, the median over repeats."""
    return [median(figure(step) for step in repeats) for repeats in zip(*measured, strict=True)]


def _losses(runs: list[Run], reference: list[float]) -> dict[str, Any]:
    gaps = [abs(a - b) for run in runs for a, b in zip(run.losses, reference, strict=True)]
    return {"final": runs[0].losses[-1], "steps": runs[0].losses, "largest_difference": max(gaps)}


def _plan(steps: Sequence[StepRecord]) -> dict[str, Any]:
    return {
        "bubble": fmean(step.plan_bubble for step in steps),
        "bound": fmean(step.bound_bubble for step in steps),
        "microbatches": [step.counts for step in steps],
        "dummies": sum(step.dummies for step in steps),
    }


def _run(run: Run, timed: bool) -> dict[str, Any]:
    return {
        "step_s": [step.step_s for step in run.measured.steps],
        "bubble": [step.bubble if timed else None for step in run.measured.steps],
        "steal": run.steal,
        "peak_bytes": [result.peak_bytes for result in run.results],
        "held_bytes": [result.held_bytes for result in run.results],
        "baseline_bytes": [result.baseline_bytes for result in run.results],
    }
