"""Runs the arms of a workload one after the other on identical data and measures where each rank's time went.

Each run has fresh processes. Repeats are interleaved (a b, a b), so that a slower machine affects all arms alike.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from odc.errors import ConfigError, OdcError, TraceError
from odc.experiments.launch import start_server
from odc.experiments.machine import processor_times, steal
from odc.experiments.results import ArmRun, JobResult
from odc.experiments.workload import Workload
from odc.trace import (
    CAPACITY,
    Breakdown,
    EpochBreakdown,
    Span,
    breakdown,
    draw,
    headline,
    load_spans,
    rank_file,
    split_waits,
    write_trace,
)

if TYPE_CHECKING:
    from odc.experiments.hosts import HostTeam

REFERENCE = "fsdp2"
DEFAULT = ("default",)


@dataclass(frozen=True)
class CompareConfig:
    """What to compare: runs of `workload`, which needs an output folder and whose arm and spans are set here.

    Losses are compared with the arm `REFERENCE` if it is among `arms`, else with the first.
    """

    workload: Workload[Any]
    arms: tuple[str, ...] = DEFAULT
    repeats: int = 1
    skip: int = 1

    def __post_init__(self) -> None:
        workload = self.workload
        if self.arms == DEFAULT:
            object.__setattr__(self, "arms", workload.default_arms)
        unknown = [arm for arm in self.arms if arm not in workload.arms]
        if unknown or not self.arms or len(set(self.arms)) < len(self.arms):
            raise ConfigError(
                f"arms must be different ones of {', '.join(workload.arms)}, not {', '.join(self.arms)!r}"
            )
        if self.repeats < 1:
            raise ConfigError(f"repeats must be at least 1, not {self.repeats!r}")
        if not 0 <= self.skip < workload.job.steps:
            raise ConfigError(f"skip must leave a step to measure: it is {self.skip}, steps is {workload.job.steps}")
        if workload.folder is None:
            raise ConfigError("a comparison needs an output folder")
        if workload.keeps:
            raise ConfigError("a comparison neither resumes, exports nor saves checkpoints")
        for arm in self.arms:
            workload.with_arm(arm)  # refuses what the arm cannot run on

    @property
    def reference(self) -> str:
        return REFERENCE if REFERENCE in self.arms else self.arms[0]

    @property
    def output(self) -> Path:
        assert self.workload.folder is not None
        return self.workload.folder


def run_arms(
    config: CompareConfig, show: Callable[[str], None], team: HostTeam | None = None
) -> dict[str, list[ArmRun]]:
    """All runs, by arm; `show` gets a line for each run. Writes spans below the output folder.

    On the hosts of a `team`, each of which calls it, those that do not lead run their ranks and return no runs.
    Raises what `odc.experiments.job.run` raises; an error of an arm carries its name as a note.
    """
    workload = config.workload
    for arm in config.arms:
        workload.with_arm(arm).check_arm()
    start_server()  # loads while the data is read
    workload.prepare("odc compare")
    runs: dict[str, list[ArmRun]] = {arm: [] for arm in config.arms}
    total = config.repeats * len(config.arms)
    for number in range(total):
        repeat, at = divmod(number, len(config.arms))
        arm = config.arms[at]
        show(f"run {number + 1} of {total}: {arm}")
        spans = spans_folder(config, arm, repeat)
        shutil.rmtree(spans, ignore_errors=True)
        before = processor_times()
        results = _run(config, arm, f"{arm} ({number + 1}/{total})", number, team)
        stolen = steal(before, processor_times())
        if team is None or team.leads:
            refuse_skipped(arm, results)
            recorded, windows = read_spans(spans, workload.job.ranks), workload.windows
            measured = measure(recorded, config.skip * windows, workload.job.steps * windows)
            parts = workload.dissect(recorded, measured)
            runs[arm].append(ArmRun(results, measured, stolen, parts))
    return runs


def _run(config: CompareConfig, arm: str, title: str, number: int, team: HostTeam | None) -> list[Any]:
    """One run; results by rank, of all hosts where this one leads."""
    from odc.experiments.job import launch_ranks  # loads torch

    spans = spans_folder(config, arm, number // len(config.arms))
    try:
        results = launch_ranks(config.workload.with_arm(arm, title, str(spans)), team, number)
    except OdcError as error:
        error.add_note(f"arm {arm}")
        raise
    return results if team is None else team.collect(number, results, spans)


def refuse_skipped(arm: str, results: Sequence[JobResult[Any]]) -> None:
    """Raises `OdcError` unless the arm has run every step."""
    for skipped in results[0].skipped:
        raise OdcError(
            f"arm {arm} skipped step {skipped.step} ({skipped.reason}); take a smaller --max-tokens, so that all arms "
            "can run all steps"
        )


def measure(spans_by_rank: dict[int, list[Span]], skip: int, steps: int) -> Breakdown:
    """The breakdown of one run of `steps` windows; raises `TraceError` unless every rank recorded every step whole."""
    measured = breakdown(split_waits(spans_by_rank).spans_by_rank, skip=skip)
    lacking = steps - len(measured.steps) - len(measured.skipped)
    if lacking:
        raise TraceError(
            f"{lacking} of {steps} steps cannot be measured: some rank's recorder, which keeps its newest {CAPACITY:,} "
            "spans, could not hold them whole. Take fewer microbatches a step."
        )
    return measured


def spans_folder(config: CompareConfig, arm: str, repeat: int) -> Path:
    """Where the ranks of one run store their spans."""
    return config.output / "spans" / f"{arm.replace('/', '-')}-{repeat}"


def read_spans(folder: Path, ranks: int) -> dict[int, list[Span]]:
    """The spans of one run by rank."""
    return {rank: load_spans(rank_file(folder, rank)) for rank in range(ranks)}


def over_repeats(
    measured: Sequence[Sequence[EpochBreakdown]], figure: Callable[[EpochBreakdown], float]
) -> list[float]:
    """Of every step, the median over repeats."""
    return [median(figure(step) for step in repeats) for repeats in zip(*measured, strict=True)]


def typical_windows(runs: Mapping[str, Sequence[ArmRun]], count: int) -> tuple[int, list[int]]:
    """The repeat, and its `count` windows in a row (or all that there are), whose times come nearest to the medians.

    Nearest: the arm whose mean over these windows is farthest from its median, over all windows and repeats, is nearer
    than for any other choice.
    """
    measured = {arm: [run.measured.steps for run in own] for arm, own in runs.items()}
    medians = {arm: median(over_repeats(steps, _seconds)) for arm, steps in measured.items()}
    (repeats, *_), (windows, *_) = zip(*((len(steps), len(steps[0])) for steps in measured.values()), strict=True)
    count = min(count, windows)

    def distance(choice: tuple[int, int]) -> float:
        repeat, at = choice
        return max(
            abs(fmean(map(_seconds, steps[repeat][at : at + count])) / medians[arm] - 1)
            for arm, steps in measured.items()
        )

    repeat, at = min(itertools.product(range(repeats), range(windows - count + 1)), key=distance)
    return repeat, [step.epoch for step in next(iter(measured.values()))[repeat][at : at + count]]


def hosts_of(runs: Mapping[str, Sequence[ArmRun]]) -> dict[int, int]:
    """Number of each rank's host, by rank."""
    (first, *_), *_ = runs.values()
    return {result.rank: result.host for result in first.results}


def _seconds(step: EpochBreakdown) -> float:
    return step.step_s


def write_pictures(config: CompareConfig, runs: Mapping[str, Sequence[ArmRun]]) -> dict[str, Path]:
    """The timeline of the windows whose times are the most typical, one panel an arm, and the trace files of that
    repeat; returns their paths by kind.

    Without matplotlib there is no `"timeline"`.
    """
    written: dict[str, Path] = {}
    panels, headlines = [], {}
    hosts = hosts_of(runs)
    repeat, epochs = typical_windows(runs, config.workload.drawn_windows)
    for arm, own in runs.items():
        recorded = read_spans(spans_folder(config, arm, repeat), config.workload.job.ranks)
        panels.append((arm, split_waits(recorded).spans_by_rank))
        measured = [run.measured.steps for run in own]
        bubble, step_s = (median(over_repeats(measured, figure)) for figure in (lambda step: step.bubble, _seconds))
        headlines[arm] = headline("measured", bubble, step_s, len(measured[0]), len(own))
        path = config.output / f"trace-{arm.replace('/', '-')}.json.gz"
        write_trace(path, panels[-1][1], hosts)
        written[f"trace {arm}"] = path
    path = config.output / "timeline.png"
    skip = config.skip * config.workload.windows
    passes = config.workload.passes()
    try:
        draw(path, panels, epochs=epochs, skip=skip, headlines=headlines, passes=passes, hosts=hosts)
    except OdcError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        return written
    return {"timeline": path} | written
