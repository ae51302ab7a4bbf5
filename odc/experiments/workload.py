"""What a workload supplies to the frame (`job`, `compare`): a job's checks, one rank's trainer, and its figures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from odc.experiments.config import GrpoConfig, JobConfig, Keep
from odc.experiments.progress import Progress
from odc.experiments.results import ArmRun, JobResult, SkippedStep, StepRecord
from odc.trace import Breakdown, Span

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer


class Trainer(ABC):
    """One rank's model, data and step, on the rank's training thread. All ranks build theirs together.

    The constructor reads data; `build`, which meets no other rank, sets `model` and `optimizer`. A checkpoint holds
    both, and `state`.
    """

    model: Any
    optimizer: Optimizer

    def check(self) -> None:
        """Checks that are made once a job, before `build`; every rank calls it, and it may meet the other ranks."""
        return

    @abstractmethod
    def build(self) -> None:
        """Builds and shards the model, and makes its optimizer."""

    @abstractmethod
    def step(self, number: int, between: Callable[[], None] | None = None) -> StepRecord | SkippedStep:
        """Runs step `number`, counted from 0; meets the other ranks.

        `between` is called between this rank's first and second microbatch, if it runs two. Raises
        `NonFiniteLossError` on every rank, before the update, if a loss or the gradient norm is not finite.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What else a checkpoint holds: JSON types, the same on every rank. Every rank calls it between two steps."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Takes what `state` returned: before `start` where a job resumes, and after it whenever a job that survives
        deaths goes back to a step that was kept. What was prepared for later steps must be dropped then.
        """

    def validate(self, done: int) -> float | None:
        """The loss of a validation set after `done` steps, the same on every rank; None where none is due.

        Every rank calls it after each step that updated; it may meet the other ranks.
        """
        return None

    def start(self, first: int) -> None:
        """Called once before step `first`, the first of this run."""
        return

    def finish(self) -> None:
        """Called once after the last step; every rank calls it."""
        return

    def close(self) -> None:
        """Called last, also after an error."""
        return

    def result(self, measured: JobResult[Any]) -> JobResult[Any]:
        """What this rank brings back, from what the frame measured."""
        return measured


C = TypeVar("C")


class Workload(ABC, Generic[C]):
    """One job; pickles. `folder` is for checkpoints or a comparison.

    `job` is `config`, or the part of it that the frame reads.
    """

    schema: ClassVar[str]  # of the figures of a comparison
    arms: ClassVar[tuple[str, ...]]  # that a comparison may name
    default_arms: ClassVar[tuple[str, ...]]
    device = "cpu"
    shown = True  # whether rank 0 shows progress
    restarts = 0  # processes that may be started in place of ranks that have ended
    keep: Keep = "host"  # where their states are kept
    fewest: int | None = None  # ranks that go on once no more may be started
    rejoin_s: float | None = None  # to wait for each before that; None: as long as for anything else
    windows = 1  # minibatches, so marked windows, of one step
    drawn_windows = 2  # in a row, in the picture of a comparison

    def __init__(self, config: C, job: JobConfig | GrpoConfig, title: str, folder: str | None) -> None:
        self.config, self.job, self.title = config, job, title
        self.folder = Path(folder) if folder is not None else None
        self.log = self.folder / "steps.jsonl" if self.folder is not None else None  # gets a line of JSON a step
        # Whether the job resumes or leaves something behind, which a comparison refuses.
        self.keeps = job.resume is not None or job.save_every > 0

    @property
    def recovering(self) -> dict[str, Any] | None:
        """The arguments of `odc.Recovery`; None where the first death ends the job."""
        if not self.restarts:
            return None
        return {"rejoin_s": self.rejoin_s or self.job.timeout_s, "keep": self.keep, "fewest": self.fewest}

    def check_arm(self) -> None:
        """Checks that this machine has what the job's arm needs; reads nothing."""
        return

    def check_extras(self) -> None:
        """Raises `ConfigError` if a package is missing that the job needs; makes no folder."""
        return

    @abstractmethod
    def check(self) -> None:
        """Quick checks that need the disk or the machine, before ranks start. Raises `ConfigError`."""

    def prepare(self, title: str = "") -> None:
        """Runs `check` and reads what the ranks will read, to refuse what cannot work. Raises also `DataError`."""
        self.check()

    @abstractmethod
    def trainer(self, progress: Progress, device: torch.device) -> Trainer:
        """This rank's part."""

    @abstractmethod
    def with_arm(self, arm: str, title: str = "", spans: str | None = None) -> Self:
        """The same job under an arm, which writes nothing but spans. Raises `ConfigError` if it cannot run so."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """All options as JSON types."""

    def dissect(self, spans_by_rank: Mapping[int, Sequence[Span]], measured: Breakdown) -> Any:
        """What a run's figures need of its spans, as recorded, beside the breakdown; kept as `ArmRun.parts`."""
        return None

    @abstractmethod
    def figures(self, runs: Sequence[ArmRun], skip: int, seconds: Sequence[float]) -> dict[str, Any]:
        """An arm's further figures; `seconds` has each counted window's median over runs."""

    def facts(self) -> dict[str, Any]:
        """Further facts of the whole comparison."""
        return {}

    def passes(self) -> list[tuple[str, str]]:
        """Label and colour of compute in microbatch 0, 1, ..., where a microbatch's index has a meaning."""
        return []
