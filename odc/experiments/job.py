"""A job of any workload: how it is started, and what every rank runs around its steps."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from odc.arms import arm_named
from odc.experiments import device as devices
from odc.experiments.checkpoint import find_checkpoint, load, save
from odc.experiments.clock import CommonClock
from odc.experiments.collectives import recorded_stalls
from odc.experiments.config import threads_per_rank
from odc.experiments.hosts import HostTeam
from odc.experiments.launch import launch
from odc.experiments.progress import Progress
from odc.experiments.results import JobResult, SkippedStep, StepRecord
from odc.experiments.update import by_rank
from odc.experiments.workload import Workload
from odc.fsdp import shutdown
from odc.provenance import json_text
from odc.recovery import Recovery
from odc.trace import (
    COMPUTE,
    MICROBATCH,
    OPTIMIZER,
    WINDOW,
    Span,
    breakdown,
    gone_back,
    rank_file,
    recorder,
    save_spans,
)

_CPU = torch.device("cpu")
_ALIGN_EVERY = 32  # steps between two measurements of the clocks of other hosts


def run(workload: Workload[Any]) -> list[Any]:
    """Checks the job, starts its ranks on this machine, and returns their results in rank order.

    Raises `ConfigError` or `DataError` before ranks start, `JobFailedError` when a rank fails.
    """
    workload.prepare()
    return launch_ranks(workload)


def launch_ranks(workload: Workload[Any], team: HostTeam | None = None, run: int = 0) -> list[Any]:
    """`run` without the checks. With `team`, which calls it for run `run` on every host, this host's ranks only."""
    if team is not None:
        return team.launch(run, _launched_rank, workload)
    return launch(
        _launched_rank, workload, ranks=workload.job.ranks, restarts=workload.restarts, fewest=workload.fewest
    )


def _launched_rank(workload: Workload[Any]) -> Any:
    logging.getLogger("odc").setLevel(logging.ERROR)  # the launching process has logged the rest already
    return run_rank(workload)


def run_rank(workload: Workload[Any]) -> Any:
    """Runs the job as one rank, in a process that has the environment of `torchrun`. Every rank calls it.

    Makes the process group and takes it down again. Raises only on the rank where something fails.
    """
    job = workload.job
    if not workload.restarts:
        workload.check()  # before the ranks meet, so before any has written
    backend = devices.backend(workload.device, job.ranks)
    with (
        rank_group(job.ranks, job.timeout_s, backend, workload.recovering) as recovery,
        closing(Progress(job.steps, workload.title, shown=workload.shown and dist.get_rank() == 0)) as progress,
    ):
        if recovery is not None and recovery.generation == 0:
            workload.check()  # a later process finds what the one before has written
        device = devices.take_device(workload.device)
        return RankJob(workload, progress, device, recovery).run()


@contextmanager
def rank_group(
    ranks: int, timeout_s: float, backend: str, recovering: dict[str, Any] | None
) -> Iterator[Recovery | None]:
    """The process group of `ranks`, in a process that has the environment of `torchrun`; sets torch's threads.

    Every rank enters it. A clean exit waits for every other rank; after an error the group is taken down at once.
    Where ranks that end are started again there is a `Recovery`, with the arguments `recovering`.
    """
    torch.set_num_threads(threads_per_rank(devices.ranks_here(ranks)))
    with nullcontext() if recovering is None else Recovery(**recovering) as recovery:
        if recovery is None:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        try:
            yield recovery
            dist.barrier()  # no rank takes the group down while another still writes
        finally:
            shutdown()
            if dist.is_initialized():  # a recovery that failed has none
                dist.destroy_process_group()


class RankJob:
    """One rank's part of a job inside a process group that is already there, on the rank's training thread.

    All ranks build theirs together. A step's spans are dropped once measured, unless the job stores them.
    """

    def __init__(
        self,
        workload: Workload[Any],
        progress: Progress,
        device: torch.device = _CPU,
        recovery: Recovery | None = None,
    ) -> None:
        from transformers.utils import logging as messages

        self.workload, self.progress, self.device = workload, progress, device
        self.recovery = recovery
        self.held: int | None = None
        self.records: list[StepRecord] = []
        self.skipped: list[SkippedStep] = []
        self._clock: CommonClock | None = None
        self.saved: Path | None = None
        self.spans: list[Span] = []
        recorder().rank = self.rank
        recorder().time_by(devices.device_clock(device))
        torch.manual_seed(workload.job.seed + self.rank)
        self.trainer: Any = workload.trainer(progress, device)
        progress.phase("building the model")
        messages.disable_progress_bar()  # it would be drawn over the job's
        devices.trim()
        self.baseline = devices.held_bytes(device)
        if recovery is None or recovery.generation == 0:
            self.trainer.check()
        self.trainer.build()

    @property
    def rank(self) -> int:
        """Another one after a recovery with other ranks."""
        return dist.get_rank()

    @property
    def clock(self) -> CommonClock:
        """The ranks meet to make it when they first need it, and again after a recovery."""
        if self._clock is None:
            self._clock = CommonClock()
        return self._clock

    def run(self) -> Any:
        on_demand = arm_named(self.workload.job.arm).on_demand
        compute = None if on_demand or self.device.type == "cpu" else torch.cuda.current_stream(self.device)
        with closing(self.trainer), recorded_stalls(compute):
            return self._run()

    def _run(self) -> JobResult[Any]:
        job, first, recovery = self.workload.job, self._resume(), self.recovery
        self.trainer.start(first)
        recorder().clear()
        self.progress.phase(f"step {first + 1}")
        steps: Iterable[int] = range(first, job.steps)
        if recovery is not None:
            recovery.protect(self.trainer.model, self.trainer.optimizer, first=first, job=self)
            steps = recovery.steps(job.steps)
        for number in steps:
            with nullcontext() if recovery is None else recovery.attempt():
                self._step(number, first)
        peak = devices.peak_bytes(self.device)
        if job.spans is not None:
            save_spans(rank_file(job.spans, self.rank), self.spans)
        self.trainer.finish()
        saved = str(self.saved) if self.saved else None
        return self.trainer.result(  # type: ignore[no-any-return]
            JobResult(self.rank, self.records, peak, self.held, self.baseline, saved, self.skipped, self.clock.host)
        )

    def _step(self, number: int, first: int) -> None:
        """One step, its report, and a checkpoint where one is due."""
        job, done = self.workload.job, number + 1
        if self._clock is None or number % _ALIGN_EVERY == 0:
            self.clock.align()
        record = self.trainer.step(number, self._probe if self.held is None else None)
        bubble = self._bubble()
        if isinstance(record, SkippedStep):
            self.skipped.append(record)
        else:
            record = replace(record, bubble=bubble, valid_loss=self.trainer.validate(done))
            recorder().clear()
            self.records.append(record)
        self._report(record)
        if number == first:
            with contextlib.suppress(OSError):  # where this is not allowed, the peak is that since the start
                devices.reset_peak(self.device)
        if self.workload.folder is not None and (done == job.steps or (job.save_every and done % job.save_every == 0)):
            self._save(self.workload.folder, done)

    # what is kept, beside model and optimizer, in a job that survives deaths

    def state_dict(self) -> dict[str, Any]:
        return {
            "trainer": self.trainer.state(),
            "records": self.records,
            "skipped": self.skipped,
            "spans": self.spans,  # empty unless the job stores them
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.restore(state["trainer"])
        self.records, self.skipped = state["records"], state["skipped"]
        self._take_spans()
        # A new process has those of the one whose place it takes, the others more than were kept.
        self.spans = gone_back(self.spans or state["spans"], recorder().newest)
        self._clock = None  # made anew by all ranks
        self.progress.show(self.workload.shown and self.rank == 0)
        if self.workload.log is not None and self.rank == 0:
            assert self.recovery is not None
            # A job that was resumed has no records of the steps before.
            _drop_after(self.workload.log, self.recovery.step)

    def _resume(self) -> int:
        resume, log, recovery = self.workload.job.resume, self.workload.log, self.recovery
        if resume is None or (recovery is not None and recovery.goes_on):  # then `protect` loads what was kept
            return 0
        self.progress.phase(f"loading {resume}")
        # A process that takes another's place has no rank to load with.
        alone = recovery is not None
        state = load(find_checkpoint(Path(resume)), self.trainer.model, self.trainer.optimizer, alone=alone)
        self.trainer.restore(state)
        if log is not None and self.rank == 0:
            _drop_after(log, int(state["step"]))
        return int(state["step"])

    def _save(self, folder: Path, done: int) -> None:
        self.progress.phase(f"saving step {done}")
        state = self.trainer.state() | {"config": self.workload.to_dict()}
        self.saved = save(folder, done, self.trainer.model, self.trainer.optimizer, state)

    def _probe(self) -> None:
        """Notes the memory between two microbatches, when no activation is alive."""
        devices.trim()
        self.held = devices.held_bytes(self.device)

    def _bubble(self) -> float | None:
        """The step's bubble over all ranks (`odc.trace.breakdown`); meets the other ranks.

        None if a rank's recorder could not hold the whole step.
        """
        workload, spans = self.workload, self._take_spans()
        mine = torch.tensor(_own_windows(self.rank, spans, workload.windows))
        starts, ends, busy = by_rank(mine).unbind(2)  # [ranks, windows] each
        if not ends.all():
            return None
        return 1.0 - float(busy.double().mean(0).sum()) / float((ends.amax(0) - starts.amin(0)).sum())

    def _take_spans(self) -> list[Span]:
        """What was recorded since the last call, on the clock of rank 0's host; kept if the job stores it."""
        spans = recorder().spans()
        recorder().clear()
        if self._clock is not None:
            spans = self._clock.on_rank_0(spans)
        if self.workload.job.spans is not None:
            self.spans += spans
        return spans

    def _report(self, record: StepRecord | SkippedStep) -> None:
        if isinstance(record, SkippedStep):
            self.progress.note(f"step {record.step} was skipped, nothing was updated: {record.reason}")
        else:
            self.progress.step(record.step, record.loss, record.tokens / record.step_s, record.bubble)
            if record.valid_loss is not None:
                self.progress.note(f"step {record.step}: validation loss {record.valid_loss:.4f}")
        log = self.workload.log
        if log is not None and self.rank == 0:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a") as lines:
                lines.write(json_text(asdict(record), indent=None))


def _drop_after(log: Path, step: int) -> None:
    """Removes from `log` the steps after `step`, which run again, and a line that was cut short."""
    if log.is_file():
        lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        beside = log.with_suffix(".partial")
        beside.write_text("".join(kept))
        beside.replace(log)


def _own_windows(rank: int, spans: list[Span], count: int) -> list[tuple[int, int, int]]:
    """Start, end and busy nanoseconds of this rank's `count` windows; zeros if they are not all whole."""
    marked = any(span.category == WINDOW for span in spans)
    windows = breakdown({rank: spans}).steps if marked else []
    if len(windows) != count:
        return [(0, 0, 0)] * count
    computed = {span.epoch for span in spans if span.category == MICROBATCH}
    rows = [(own, own.nanoseconds[rank]) for own in windows]
    return [
        (own.start_ns, own.end_ns, (row[COMPUTE] if own.epoch in computed else 0) + row[OPTIMIZER]) for own, row in rows
    ]
