"""Runs arms one after the other on identical data and measures where each rank's time went.

Chose a set of fresh processes for every run over switching arms inside one: no arm inherits another's memory, threads
or caches, and each is what `odc train` would run. The cost is some seconds of start-up a run, outside every figure.
Repeats are interleaved (a b, a b), so that a machine that grows slower hurts all arms alike.

What is identical: the samples of every minibatch, the initial weights, the optimizer. What differs: the plan, and who
communicates when (`odc.arms`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from odc.arms import ARM_NAMES, ArmName
from odc.errors import ConfigError, OdcError, TraceError
from odc.experiments.config import DEFAULT_ARMS, JobConfig
from odc.experiments.machine import processor_times, steal
from odc.experiments.preflight import check_arm
from odc.experiments.results import JobResult
from odc.trace import CAPACITY, Breakdown, Span, breakdown, draw, load_spans, split_waits, write_trace

REFERENCE: ArmName = "fsdp2"


@dataclass(frozen=True)
class CompareConfig:
    """What to compare.

    Args:
        job: the job that every arm runs; its arm, label and spans are set here. Needs an output folder.
        arms: in table order, without repetition; losses are compared with `REFERENCE` if it is among them, else with
            the first.
        repeats: runs of each arm.
        skip: leading steps of every run that no figure counts (warm-up).
    """

    job: JobConfig
    arms: tuple[ArmName, ...] = field(
        default=DEFAULT_ARMS, metadata={"help": f"Which of {', '.join(ARM_NAMES)}, with commas."}
    )
    repeats: int = field(default=1, metadata={"help": "Runs of each arm, interleaved."})
    skip: int = field(default=1, metadata={"help": "First steps of every run that are not counted."})

    def __post_init__(self) -> None:
        unknown = [arm for arm in self.arms if arm not in ARM_NAMES]
        if unknown or not self.arms or len(set(self.arms)) < len(self.arms):
            raise ConfigError(f"arms must be different ones of {', '.join(ARM_NAMES)}, not {', '.join(self.arms)!r}")
        for arm in self.arms:
            self.job.with_(arm=arm)  # refuses what the arm cannot run on
        if self.repeats < 1:
            raise ConfigError(f"repeats must be at least 1, not {self.repeats!r}")
        if not 0 <= self.skip < self.job.steps:
            raise ConfigError(f"skip must leave a step to measure: it is {self.skip}, steps is {self.job.steps}")
        if self.job.output is None:
            raise ConfigError("a comparison needs an output folder")
        if self.job.export is not None or self.job.resume is not None or self.job.save_every:
            raise ConfigError("a comparison neither resumes, exports nor saves checkpoints")

    @property
    def reference(self) -> ArmName:
        """The arm whose losses the others are compared with."""
        return REFERENCE if REFERENCE in self.arms else self.arms[0]

    @property
    def output(self) -> Path:
        """Folder of everything that is written."""
        assert self.job.output is not None
        return Path(self.job.output)


@dataclass(frozen=True)
class Run:
    """One run of one arm: what its ranks brought back, and where their time went."""

    results: list[JobResult]
    measured: Breakdown
    steal: float | None = None  # share of the cores' time that the host took while it ran

    @property
    def losses(self) -> list[float]:
        """Of every step, warm-up included."""
        return [step.loss for step in self.results[0].steps]


def run_arms(config: CompareConfig, say: Callable[[str], None]) -> dict[ArmName, list[Run]]:
    """All runs, by arm; `say` is told which arm runs. Writes spans below the output folder.

    Raises what `odc.experiments.job.run` raises; of a failing arm the message has its name.
    """
    from odc.experiments.job import launch_ranks, prepare

    for arm in config.arms:
        check_arm(config.job, arm)
    prepare(config.job.with_(label="odc compare"))
    runs: dict[ArmName, list[Run]] = {arm: [] for arm in config.arms}
    total = config.repeats * len(config.arms)
    for number in range(total):
        repeat, at = divmod(number, len(config.arms))
        arm = config.arms[at]
        say(f"run {number + 1} of {total}: {arm}")
        spans = spans_folder(config, arm, repeat)
        shutil.rmtree(spans, ignore_errors=True)
        job = config.job.with_(arm=arm, label=f"{arm} ({number + 1}/{total})", output=None, spans=str(spans))
        before = processor_times()
        try:
            results = launch_ranks(job)
        except OdcError as error:
            error.add_note(f"arm {arm}")
            raise
        refuse_skipped(arm, results)
        stolen = steal(before, processor_times())
        runs[arm].append(Run(results, measure(read_spans(spans, job.ranks), config.skip, job.steps), stolen))
    return runs


def refuse_skipped(arm: str, results: list[JobResult]) -> None:
    """Raise `OdcError` unless the arm has run every step: another arm's steps would be compared with none."""
    for skipped in results[0].skipped:
        raise OdcError(
            f"arm {arm} skipped step {skipped.step} ({skipped.reason}); take a smaller --max-tokens, so that all arms "
            "can run all steps"
        )


def measure(spans_by_rank: dict[int, list[Span]], skip: int, steps: int) -> Breakdown:
    """The breakdown of one run of `steps`, with waiting and transfer inside FSDP2's collectives told apart.

    Raises `TraceError` unless every step was recorded whole on every rank.
    """
    measured = breakdown(split_waits(spans_by_rank).spans_by_rank, skip=skip)
    lacking = steps - len(measured.steps) - len(measured.skipped)
    if lacking:
        raise TraceError(
            f"{lacking} of {steps} steps cannot be measured: some rank's recorder, which keeps its newest {CAPACITY:,} "
            "spans, could not hold them whole. Take fewer microbatches a step."
        )
    return measured


def spans_folder(config: CompareConfig, arm: ArmName, repeat: int) -> Path:
    """Where the ranks of one run store their spans."""
    return config.output / "spans" / f"{arm}-{repeat}"


def read_spans(folder: Path, ranks: int) -> dict[int, list[Span]]:
    """The spans of one run by rank."""
    return {rank: load_spans(folder / f"rank-{rank}.jsonl") for rank in range(ranks)}


def write_pictures(config: CompareConfig) -> dict[str, Path]:
    """The timeline of the last repeat, one panel an arm, and its trace files; returns their paths by kind.

    Arms whose spans say nothing (`odc.experiments.device.can_time`) are left out. Without matplotlib, or without any
    arm, there is no timeline, and `"timeline"` is not among the keys.
    """
    from odc.experiments.device import can_time

    written: dict[str, Path] = {}
    panels = []
    for arm in config.arms:
        if not can_time(config.job, arm):
            continue
        spans = split_waits(read_spans(spans_folder(config, arm, config.repeats - 1), config.job.ranks)).spans_by_rank
        panels.append((arm, spans))
        path = config.output / f"trace-{arm}.json.gz"
        write_trace(path, spans)
        written[f"trace {arm}"] = path
    path = config.output / "timeline.png"
    last = range(max(config.skip, config.job.steps - 2) + 1, config.job.steps + 1)
    if not panels:
        return written
    try:
        draw(path, panels, epochs=last, skip=config.skip)
    except OdcError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        return written
    return {"timeline": path} | written
