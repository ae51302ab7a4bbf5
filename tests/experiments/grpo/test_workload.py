"""Arms of a GRPO job, compared."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from support.small_model import toy

from odc.errors import ConfigError
from odc.experiments.compare import CompareConfig, measure
from odc.experiments.grpo import GrpoResult, GrpoStep, GrpoWorkload
from odc.experiments.report import report
from odc.experiments.results import ArmRun
from odc.experiments.table import table
from odc.trace import MICROBATCH, OPTIMIZER, WINDOW, Span

MS = 1_000_000


def run_of(computes: list[list[int]]) -> ArmRun:
    """Two steps of two updates each; update k of rank r computes for `computes[r][k]` ms of 100, then updates."""
    spans = {}
    for rank, own in enumerate(computes):
        spans[rank] = list[Span]()
        for update, milliseconds in enumerate(own, start=1):
            at = update * 1000 * MS
            spans[rank].append(Span(MICROBATCH, "main", at, at + milliseconds * MS, update, 0))
            spans[rank].append(Span(WINDOW, "main", at, at + 100 * MS, update))
            spans[rank].append(Span(OPTIMIZER, "main", at + 100 * MS, at + 110 * MS, update))
    steps = [
        GrpoStep(
            step=number, loss=0.5, norm=1.0, samples=8, tokens=80, label_tokens=40, step_s=1.0, version=None,
            reward=0.25 * number, response_tokens=5.0, longest=9, kl=0.0, counts=[1, 2], rollout_s=0.3, train_s=0.2,
        )
        for number in (1, 2)
    ]  # fmt: skip
    results = [GrpoResult(rank, steps, 300 << 20, 120 << 20, 100 << 20) for rank in range(2)]
    return ArmRun(results, measure(spans, 2, 4))


def test_figures_count_updates_and_the_table_has_their_rows(tmp_path: Path) -> None:
    console = pytest.importorskip("rich.console", reason="needs the cli extra")
    config = CompareConfig(
        GrpoWorkload(toy(tmp_path, steps=2, minibatches=2, folder=str(tmp_path / "out"))), ("fsdp2", "odc/verl")
    )
    run = run_of([[90, 90, 90, 50], [90, 90, 90, 90]])
    figures = report(config, {"fsdp2": [run], "odc/verl": [run]}, ["odc", "grpo"])
    arm = json.loads(json.dumps(figures))["arms"]["odc/verl"]
    assert len(run.measured.steps) == 2, "the two updates of the step that counts"
    assert arm["step_s"]["median"] == pytest.approx(0.11)
    assert arm["total"] == pytest.approx({"seconds": 0.2, "samples_per_s": 40.0, "tokens_per_s": 400.0})
    assert arm["reward"] == {"first": 0.5, "final": 0.5} and arm["loss"]["largest_difference"] == 0
    shown = io.StringIO()
    console.Console(file=shown, width=80).print(table(figures))
    assert re.search(r"final reward +0.500 +0.500", shown.getvalue()) and "prediction" not in shown.getvalue()


def test_arms_by_name(tmp_path: Path) -> None:
    workload = GrpoWorkload(toy(tmp_path, folder=str(tmp_path / "out")))
    assert CompareConfig(workload).arms == ("fsdp2", "fsdp2-resident", "odc-equal", "odc")
    config = workload.with_arm("odc/verl").config
    assert (config.arm, config.balance, config.folder) == ("odc", "verl", None)
    with pytest.raises(ConfigError, match="arms must be different ones of"):
        CompareConfig(workload, ("odc-dynamic",))
