"""Multimodal training as a workload: its checks, its arms, and the figures that only it has (docs/multimodal.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from odc.errors import ConfigError
from odc.experiments.multimodal.config import TRANSPORTS, MultimodalConfig
from odc.experiments.multimodal.examples import PHASES, Phase, read_examples
from odc.experiments.multimodal.model import load_config
from odc.experiments.multimodal.plan import BALANCES, Balance, phase_costs
from odc.experiments.multimodal.step import PASSES, MultimodalTrainer
from odc.experiments.preflight import check_output, writable_folder
from odc.experiments.progress import Progress
from odc.experiments.results import ArmRun
from odc.experiments.table import empty_table, medians_over
from odc.experiments.workload import Workload
from odc.trace import COMPUTE, MICROBATCH, Breakdown, Span, Stat
from odc.trace.cover import cover, marked_epochs

if TYPE_CHECKING:
    from rich.table import Table

#: Compute in the picture: each pass of a step by its phase.
COLOURS = {"image": "#8fbf7f", "audio": "#c9a0dc", "llm": "#a9c6e3"}
_ARMS = tuple(f"{transport}/{balance}" for transport in TRANSPORTS for balance in BALANCES)


_MIB = float(1 << 20)
_SECOND = 1e9


@dataclass(frozen=True)
class PhaseTime:
    """One phase of one step, in seconds by rank: computing in its passes, and from their begin to their end."""

    busy_s: dict[int, float]
    spent_s: dict[int, float]

    @property
    def bubble(self) -> float:
        """1 - mean over ranks of busy / the longest rank's time in the phase; 0 where no rank ran it."""
        longest = max(self.spent_s.values())
        return 1.0 - fmean(self.busy_s.values()) / longest if longest else 0.0


def phase_times(spans_by_rank: Mapping[int, Sequence[Span]], epoch: int) -> dict[Phase, PhaseTime]:
    """Seconds in each phase of one step (`epoch`, from 1), from the spans of all ranks."""
    mine = {rank: [span for span in spans if span.epoch == epoch] for rank, spans in spans_by_rank.items()}
    times = {phase: PhaseTime(dict.fromkeys(mine, 0.0), dict.fromkeys(mine, 0.0)) for phase in PHASES}
    marked = marked_epochs(mine)
    for rank, spans in mine.items():
        for piece in cover(spans, marked):
            if piece.category == COMPUTE and piece.microbatch >= 0:
                times[PASSES[piece.microbatch]].busy_s[rank] += (piece.end_ns - piece.start_ns) / _SECOND
        for span in spans:
            if span.category == MICROBATCH:
                times[PASSES[span.microbatch]].spent_s[rank] += (span.end_ns - span.start_ns) / _SECOND
    return times


def _phase(runs: Sequence[ArmRun], skip: int, phase: Phase) -> dict[str, Any]:
    """An arm's figures of a phase; `ArmRun.parts` has the `phase_times` of each counted step."""
    steps = len(runs[0].parts)

    def over(figure: Callable[[PhaseTime], float]) -> dict[str, float]:
        return Stat.of(median(figure(run.parts[at][phase]) for run in runs) for at in range(steps)).to_dict()

    counts = [step.phases[phase] for result in runs[0].results for step in result.steps[skip:]]
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


def table(figures: dict[str, Any]) -> Table:
    """A rich table of what `report` returned, a row an arm. Raises OdcError when rich is missing."""
    job = figures["job"]
    title = f"{job['ranks']} ranks, {figures['per_node']} a node (declared), {job['minibatch_size']} examples a step"
    headings = [heading for heading, _ in _COLUMNS]
    made = empty_table(title, _caption(figures), headings, padding=(0, 0), collapse_padding=True, show_edge=False)
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
    return (
        f"{medians_over(figures)} GF/s: useful GFLOP/s, without padding, all ranks. Bubbles are "
        "measured: of the step, and of each phase (1 - mean busy / the longest rank's time in it). MiB: exchanged in a "
        "step by all ranks, within and across declared nodes; buf: most that one rank needs for a move, or its arena. "
        "Peak: of the largest rank, above what it held before the model was built. "
        f"The loss gap is the largest of any step, to {figures['reference']}."
    )


class MultimodalWorkload(Workload[MultimodalConfig]):
    """A job of `odc train-mm`."""

    schema = "odc-train-mm-1"
    arms = _ARMS
    default_arms = _ARMS
    drawn_windows = 1

    def __init__(self, config: MultimodalConfig) -> None:
        super().__init__(config, config.job, config.job.label or config.name, config.job.output)

    def check(self) -> None:
        job = self.config.job
        if job.recover:
            raise ConfigError("recover is for odc train and odc grpo; a multimodal job ends with its first rank")
        phase_costs(load_config(job.model))
        check_output(job.output, job.resume)
        if job.spans is not None:
            writable_folder(Path(job.spans), "spans")

    def prepare(self, title: str = "") -> None:
        """Also reads every line of the corpus, and the headers of its files."""
        self.check()
        job = self.config.job
        geometry = load_config(job.model).geometry
        read_examples(Path(job.data), geometry, max_tokens=job.max_tokens)

    def trainer(self, progress: Progress, device: torch.device) -> MultimodalTrainer:
        return MultimodalTrainer(self.config)

    def with_arm(self, arm: str, title: str = "", spans: str | None = None) -> Self:
        transport, _, balance = arm.partition("/")
        changes = {"arm": transport, "label": title, "output": None, "spans": spans}
        return type(self)(self.config.with_(cast(Balance, balance), **changes))

    def to_dict(self) -> dict[str, Any]:
        return self.config.job.to_dict()

    def dissect(self, spans_by_rank: Mapping[int, Sequence[Span]], measured: Breakdown) -> Any:
        return [phase_times(spans_by_rank, step.epoch) for step in measured.steps]

    def figures(self, runs: Sequence[ArmRun], skip: int, seconds: Sequence[float]) -> dict[str, Any]:
        steps = runs[0].results[0].steps[skip:]
        results: list[Any] = [result for run in runs for result in run.results]
        return {
            "tokens_per_s": sum(step.tokens for step in steps) / sum(seconds),
            "useful_flops_per_s": sum(step.flops for step in steps) / sum(seconds),
            "phases": {phase: _phase(runs, skip, phase) for phase in PHASES},
            "plan_s": median(step.plan_s for result in results for step in result.steps),
            "waited_s": median(step.waited_s for result in results for step in result.steps[skip:]),
            "exchange_bytes": max(result.exchange_bytes for result in results),
        }

    def facts(self) -> dict[str, Any]:
        return {"per_node": self.config.per_node}

    def passes(self) -> list[tuple[str, str]]:
        return [(phase, COLOURS[phase]) for phase in PASSES]
