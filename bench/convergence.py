"""Trains the same job under several arms for some hundred steps and compares the losses step by step.

Run as `OMP_NUM_THREADS=1 python -m bench.convergence --results bench/results`. Every arm gets the same samples in the
same order, the same initial weights and the same optimizer; what differs is the plan and the order of fp32 sums. The
gap of `odc` means something only beside that of a control: `fsdp2-resident`, which is torch's FSDP2 as well, with
another plan and another order of sums.

Each run writes its losses step by step below `--folder`.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.script import Script
from odc.arms import ArmName, arm_named
from odc.experiments.config import JobConfig
from odc.experiments.job import run
from odc.experiments.text.step import TextWorkload

REFERENCE: ArmName = "fsdp2"
ARMS: tuple[ArmName, ...] = (REFERENCE, "fsdp2-resident", "odc")
_COLOURS = {"fsdp2": "#d8431f", "fsdp2-resident": "#e6ab02", "odc": "#27496d"}
_LAST = 50  # steps of the mean at the end
_FLOOR = 1e-9  # where the picture has losses that are equal


def job_of(given: Any) -> JobConfig:
    """The job that all arms run, without arm and output folder."""
    same = ("model", "vocab", "max_tokens", "minibatch_size", "steps", "seed")
    options = {name: getattr(given, name) for name in same}
    return JobConfig(data="stdlib", long="drop", lr=2e-3, warmup=given.steps // 15, **options)


def records_of(arm: ArmName, job: JobConfig, folder: Path) -> tuple[list[dict[str, Any]], float]:
    """Trains one arm; returns the records of every step, and seconds."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    run(TextWorkload(job.with_(arm=arm, output=str(folder), label=arm)))
    records = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, job.steps + 1))
    return records, time.monotonic() - began


def row_of(arm: ArmName, losses: list[float], reference: list[float], seconds: float) -> dict[str, Any]:
    """One line of the table."""
    gaps = [abs(mine - theirs) for mine, theirs in zip(losses, reference, strict=True)]
    largest = max(range(len(gaps)), key=gaps.__getitem__)
    return {
        "arm": arm,
        "first loss": losses[0],
        "final loss": losses[-1],
        f"mean loss of the last {_LAST}": fmean(losses[-_LAST:]),
        "largest gap": gaps[largest],
        "at step": largest + 1,
        "final gap": gaps[-1],
        "mean gap": fmean(gaps),
        "minutes": seconds / 60,
    }


def draw(path: Path, losses: dict[ArmName, list[float]], title: str) -> None:
    """Loss curves above, distances to the reference on a logarithmic axis below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    reference = losses[REFERENCE]
    steps = range(1, len(reference) + 1)
    styles = ("-", (0, (5, 3)), (0, (1, 2)))
    for (arm, curve), style in zip(losses.items(), styles, strict=True):
        upper.plot(
            steps, curve, linestyle=style, color=_COLOURS[arm], linewidth=1.6, label=f"{arm}: {arm_named(arm).about}"
        )
        if arm != REFERENCE:
            gaps = [max(abs(mine - theirs), _FLOOR) for mine, theirs in zip(curve, reference, strict=True)]
            lower.semilogy(steps, gaps, color=_COLOURS[arm], linewidth=0.9, label=f"{arm} against {REFERENCE}")
    upper.set(ylabel="loss of the minibatch", title=title)
    lower.set(xlabel="optimizer step", ylabel=f"distance of losses\n(equal ones at {_FLOOR:.0e})")
    lower.set_ylim(top=20 * lower.get_ylim()[1])
    for axes, columns in ((upper, 1), (lower, 2)):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="upper right", ncols=columns)
    figure.savefig(path, dpi=110)


def main() -> None:
    script = Script(
        __doc__,
        folder=(Path("runs/convergence"), "where runs keep their losses"),
        steps=(300, "of each arm"),
        model=("qwen2-toy", "shipped config"),
        vocab=(512, "tokens of the trained BPE"),
        max_tokens=(512, "cap of a microbatch; longer documents are dropped"),
        minibatch_size=(8, "documents of a step"),
        seed=(0, "of samples and weights"),
    )
    job, records, seconds = job_of(script.given), {}, {}
    for arm in ARMS:
        print(f"{arm}: {job.steps} steps", file=sys.stderr, flush=True)
        records[arm], seconds[arm] = records_of(arm, job, script.given.folder / arm)
    losses = {arm: [record["loss"] for record in each] for arm, each in records.items()}
    assert len({tuple(record["tokens"] for record in each) for each in records.values()}) == 1, "samples differ"
    title = f"{job.ranks} ranks, {job.model}, {job.minibatch_size} documents a step: losses of {len(ARMS)} arms"
    rows = [row_of(arm, losses[arm], losses[REFERENCE], seconds[arm]) for arm in ARMS]
    norms = {arm: [record["norm"] for record in each] for arm, each in records.items()}
    script.store("convergence", title, rows, job=job.to_dict(), losses=losses, norms=norms)
    draw(script.given.results / "convergence.png", losses, title)


if __name__ == "__main__":
    main()
