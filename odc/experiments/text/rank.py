"""One rank's part of a job, inside a process group that is already there: load, train, save, export.

Chose to measure every step as it ends and then drop its spans, unless the job stores them: memory stays bounded over a
long job. It costs two small meetings a step outside what is measured, one of which lets rank 0 show the bubble of all
ranks.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from odc.arms import arm_named
from odc.experiments import footprint
from odc.experiments.checkpoint import find_checkpoint, load, save
from odc.experiments.config import JobConfig
from odc.experiments.data.dataset import load_dataset
from odc.experiments.data.sampling import MinibatchSampler
from odc.experiments.device import can_time
from odc.experiments.export import export
from odc.experiments.progress import Progress
from odc.experiments.results import JobResult, SkippedStep, StepRecord
from odc.experiments.sharded import build_sharded, plan_cost
from odc.experiments.text.step import Step
from odc.trace import COMPUTE, MICROBATCH, OPTIMIZER, WINDOW, Span, breakdown, recorder, save_spans

STEPS = "steps.jsonl"
_CPU = torch.device("cpu")


class RankJob:
    """Built and run on every rank, on its training thread. Building meets no other rank; running does.

    Args:
        config: the same on every rank.
        progress: shown on one rank.
        device: own device.
    """

    def __init__(self, config: JobConfig, progress: Progress, device: torch.device = _CPU) -> None:
        self.config, self.progress, self.rank, self.device = config, progress, dist.get_rank(), device
        self.output = Path(config.output) if config.output is not None else None
        if self.output is not None:
            self.output.mkdir(parents=True, exist_ok=True)
        self.held: int | None = None
        self.saved: Path | None = None
        self.spans: list[Span] = []
        recorder().set_rank(self.rank)
        torch.manual_seed(config.seed + self.rank)
        self.dataset = load_dataset(config, progress)
        self.sampler = MinibatchSampler(len(self.dataset.documents), config.minibatch_size, config.seed)
        progress.phase("building the model")
        _quiet_transformers()
        footprint.trim()
        self.baseline = footprint.held_bytes(device)
        arm, vocab = arm_named(config.arm), self.dataset.tokenizer.vocab_size
        self.model, self.optimizer = build_sharded(config, arm, vocab, device)
        self.step = Step(config, arm, self.model, self.optimizer, self.dataset, plan_cost(config, vocab), device)

    def run(self) -> JobResult:
        """All steps that are left, then the last checkpoint and the export."""
        first = self._resume()
        records: list[StepRecord] = []
        skipped: list[SkippedStep] = []
        recorder().clear()
        self.progress.phase(f"step {first + 1}")
        for step in range(first, self.config.steps):
            record = self.step.run(step, next(self.sampler), self._probe if self.held is None else None)
            bubble = self._measured()
            if isinstance(record, SkippedStep):
                skipped.append(record)
                self._report(record)
            else:
                records.append(replace(record, bubble=bubble))
                self._report(records[-1])
            if step == first:
                with contextlib.suppress(OSError):  # where this is not allowed, the peak is that since the start
                    footprint.reset_peak(self.device)
            if self.output is not None and self._due(step + 1):
                self._save(self.output, step + 1)
        peak = footprint.peak_bytes(self.device)
        if self.config.spans is not None:
            save_spans(Path(self.config.spans) / f"rank-{self.rank}.jsonl", self.spans)
        if self.config.export is not None:
            self.progress.phase(f"exporting to {self.config.export}")
            export(Path(self.config.export), self.model, self.dataset.tokenizer)
        return JobResult(
            rank=self.rank,
            steps=records,
            peak_bytes=peak,
            held_bytes=self.held,
            baseline_bytes=self.baseline,
            checkpoint=str(self.saved) if self.saved else None,
            skipped=skipped,
        )

    def _resume(self) -> int:
        if self.config.resume is None:
            return 0
        self.progress.phase(f"loading {self.config.resume}")
        job = load(find_checkpoint(Path(self.config.resume)), self.model, self.optimizer)
        self.sampler.load_state_dict(job["sampler"])
        if self.output is not None and self.rank == 0:
            _drop_after(self.output / STEPS, int(job["step"]))
        return int(job["step"])

    def _due(self, done: int) -> bool:
        every = self.config.save_every
        return done == self.config.steps or (every > 0 and done % every == 0)

    def _save(self, output: Path, done: int) -> None:
        self.progress.phase(f"saving step {done}")
        job = {"sampler": self.sampler.state_dict(), "config": self.config.to_dict()}
        self.saved = save(output, done, self.model, self.optimizer, job)

    def _probe(self) -> None:
        """Memory between two microbatches: what the arm holds when no activation is alive."""
        footprint.trim()
        self.held = footprint.held_bytes(self.device)

    def _measured(self) -> float | None:
        """The step's bubble over all ranks, as `odc.trace.breakdown` defines it; meets the other ranks.

        None where a rank's recorder could not hold the whole step, or where spans do not tell (`can_time`).
        """
        spans = recorder().spans()
        recorder().clear()
        if self.config.spans is not None:
            self.spans += spans
        mine = torch.tensor(_start_end_busy(self.rank, spans))
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        starts, ends, busy = torch.stack(rows).unbind(1)
        if not ends.all() or not can_time(self.config, self.config.arm):
            return None
        return 1.0 - float(busy.double().mean()) / float(ends.max() - starts.min())

    def _report(self, record: StepRecord | SkippedStep) -> None:
        if isinstance(record, SkippedStep):
            self.progress.note(f"step {record.step} was skipped, nothing was updated: {record.reason}")
        else:
            if record.retried is not None:
                self.progress.note(f"step {record.step} was run again in smaller microbatches: {record.retried}")
            self.progress.step(record.step, record.loss, record.tokens / record.step_s, record.bubble)
        if self.output is not None and self.rank == 0:
            with (self.output / STEPS).open("a") as log:
                log.write(json.dumps(asdict(record)) + "\n")


def _drop_after(log: Path, step: int) -> None:
    """Takes out of `log` the steps after `step`, which run again, and a line that was cut short."""
    if log.is_file():
        lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        beside = log.with_suffix(".partial")
        beside.write_text("".join(kept))
        beside.replace(log)


def _start_end_busy(rank: int, spans: list[Span]) -> tuple[int, int, int]:
    """A rank's own step in nanoseconds: start, end, and how long of it the rank was busy; zeros if it is not whole."""
    if not any(span.category == WINDOW for span in spans):
        return 0, 0, 0
    own = breakdown({rank: spans}).steps[-1]
    row = own.nanoseconds[rank]
    computed = row[COMPUTE] if any(span.category == MICROBATCH for span in spans) else 0
    return own.start_ns, own.end_ns, computed + row[OPTIMIZER]


def _quiet_transformers() -> None:
    """Its own progress bars would be drawn over the job's."""
    from transformers.utils import logging as messages

    messages.disable_progress_bar()
