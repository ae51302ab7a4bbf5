"""Runs the arms of a multimodal comparison one after the other on identical data.

Chose fresh processes for every run, interleaved repeats, and two separate choices that make up an arm, transport and
balance, as `odc compare` does. What is identical: the examples of every minibatch, the initial weights, the optimizer.
What differs: who computes which phase of which example, and who communicates when.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from odc.errors import ConfigError, OdcError
from odc.experiments.compare import measure, read_spans
from odc.experiments.launch import launch, start_server
from odc.experiments.machine import processor_times, steal
from odc.experiments.multimodal.config import TRANSPORTS, MultimodalConfig
from odc.experiments.multimodal.job import check, run_rank
from odc.experiments.multimodal.minibatch import Phase
from odc.experiments.multimodal.phases import PhaseTime, phase_times
from odc.experiments.multimodal.plan import BALANCES
from odc.experiments.multimodal.results import MultimodalResult
from odc.trace import Breakdown, draw, split_waits, write_trace

#: Compute in the picture: each pass of a step by its phase.
COLOURS = {"image": "#8fbf7f", "audio": "#c9a0dc", "llm": "#a9c6e3"}


@dataclass(frozen=True)
class CompareConfig:
    """What to compare.

    Args:
        config: the job that every arm runs; its transport and balance are set here. Needs an output folder.
        arms: names, `transport/balance`, in table order.
        repeats: runs of each arm.
        skip: leading steps of every run that no figure counts (warm-up).
    """

    config: MultimodalConfig
    arms: tuple[str, ...] = tuple(f"{transport}/{balance}" for transport in TRANSPORTS for balance in BALANCES)
    repeats: int = 1
    skip: int = 1

    def __post_init__(self) -> None:
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise ConfigError(f"arms must be different ones of TRANSPORT/BALANCE, not {', '.join(self.arms)!r}")
        for arm in self.arms:
            self.arm(arm)
        if self.repeats < 1 or not 0 <= self.skip < self.config.job.steps:
            raise ConfigError("repeats must be at least 1, and skip must leave a step to measure")
        if self.config.job.output is None:
            raise ConfigError("a comparison needs an output folder")

    def arm(self, name: str) -> MultimodalConfig:
        """The job of one arm; ConfigError when there is none of that name."""
        transport, _, balance = name.partition("/")
        if transport not in TRANSPORTS or balance not in BALANCES:
            raise ConfigError(
                f"there is no arm {name!r}; a name is {' or '.join(TRANSPORTS)}, a slash, and one of "
                f"{', '.join(BALANCES)}"
            )
        return self.config.with_(balance, arm=transport)

    @property
    def output(self) -> Path:
        """Folder of everything that is written."""
        assert self.config.job.output is not None
        return Path(self.config.job.output)

    def spans(self, arm: str, repeat: int) -> Path:
        """Where the ranks of one run store their spans."""
        return self.output / "spans" / f"{arm.replace('/', '-')}-{repeat}"


@dataclass(frozen=True)
class Run:
    """One run of one arm: what its ranks brought back, and where their time went in each counted step."""

    results: list[MultimodalResult]
    measured: Breakdown
    phases: list[dict[Phase, PhaseTime]]
    steal: float | None

    @property
    def losses(self) -> list[float]:
        """Of every step, warm-up included."""
        return [step.loss for step in self.results[0].steps]


def run_arms(config: CompareConfig, say: Callable[[str], None]) -> dict[str, list[Run]]:
    """All runs, by arm; `say` is told which arm runs. Writes spans below the output folder.

    Raises what `odc.experiments.multimodal.job.run` raises; of a failing arm the message has its name.
    """
    check(config.config)
    start_server()
    runs: dict[str, list[Run]] = {arm: [] for arm in config.arms}
    total = config.repeats * len(config.arms)
    for number in range(total):
        repeat, at = divmod(number, len(config.arms))
        arm = config.arms[at]
        say(f"run {number + 1} of {total}: {arm}")
        spans = config.spans(arm, repeat)
        shutil.rmtree(spans, ignore_errors=True)
        job = config.arm(arm).with_(label=f"{arm} ({number + 1}/{total})", output=None, spans=str(spans))
        before = processor_times()
        try:
            results: list[MultimodalResult] = launch(run_rank, job, ranks=job.job.ranks)
        except OdcError as error:
            error.add_note(f"arm {arm}")
            raise
        stolen = steal(before, processor_times())
        by_rank = split_waits(read_spans(spans, job.job.ranks)).spans_by_rank
        measured = measure(by_rank, config.skip, job.job.steps)
        phases = [phase_times(by_rank, step.epoch) for step in measured.steps]
        runs[arm].append(Run(results, measured, phases, stolen))
    return runs


def write_pictures(config: CompareConfig) -> dict[str, Path]:
    """The timeline of the last repeat's last step, one panel an arm, and trace files; returns their paths by kind.

    Without matplotlib there is no timeline, and `"timeline"` is not among the keys.
    """
    from odc.experiments.multimodal.step import PASSES

    written: dict[str, Path] = {}
    panels = []
    job = config.config.job
    for arm in config.arms:
        spans = split_waits(read_spans(config.spans(arm, config.repeats - 1), job.ranks)).spans_by_rank
        panels.append((arm, spans))
        path = config.output / f"trace-{arm.replace('/', '-')}.json.gz"
        write_trace(path, spans)
        written[f"trace {arm}"] = path
    path = config.output / "timeline.png"
    passes = [(phase, COLOURS[phase]) for phase in PASSES]
    try:
        draw(path, panels, epochs=[job.steps], skip=config.skip, passes=passes)
    except OdcError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        return written
    return {"timeline": path} | written
