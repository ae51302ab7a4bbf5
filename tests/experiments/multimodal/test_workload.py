"""`odc train-mm` as a user meets it; its ranks are processes of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command import odc
from support.tiny_multimodal import tiny_job

from odc.errors import ConfigError
from odc.experiments.compare import CompareConfig
from odc.experiments.multimodal.workload import MultimodalWorkload

pytest.importorskip("typer", reason="needs the cli extra")


def test_one_table_of_all_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job, output = tiny_job(tmp_path).job, tmp_path / "out"
    wanted = ["fsdp2/none", "odc/full", "fsdp2/all-gather"]
    options = [
        "--model",
        job.model,
        "--data",
        job.data,
        "--steps",
        "2",
        "--minibatch-size",
        "6",
        "--output",
        str(output),
        "--arms",
        ",".join(wanted),
    ]
    monkeypatch.setattr(sys, "argv", ["odc", "train-mm", *options])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    code = odc("train-mm", *options)
    table, progress = capfd.readouterr()
    assert code == 0, progress
    assert "Traceback" not in progress and "Warning" not in progress
    rows = [line.split() for line in table.splitlines() if line.startswith(("fsdp2/", "odc/"))]
    assert [row[0] for row in rows] == wanted and {len(row) for row in rows} == {14}
    assert "…" not in table, "a cell was cut to fit the terminal"
    figures = json.loads((output / "train-mm.json").read_text())
    assert figures["command"][:2] == ["odc", "train-mm"]
    assert figures["load_1min"].keys() == {"begin", "end"} and {"commit", "date"} <= figures.keys()
    _check_figures(figures["arms"])
    names = sorted(path.name for path in output.iterdir())
    assert "timeline.png" in names and sum(name.startswith("trace-") for name in names) == 3


def _check_figures(arms: dict[str, Any]) -> None:
    none, full = arms["fsdp2/none"], arms["odc/full"]
    assert none["loss"]["largest_difference"] == 0
    assert full["loss"]["largest_difference"] < 1e-4
    for arm in arms.values():
        assert all(len(run["peak_bytes"]) == 2 for run in arm["runs"])  # as in the comparison of any job
        useful = arm["useful_flops_per_s"] * arm["step_s"]["median"]  # of the one step that counts
        assert useful == pytest.approx(none["useful_flops_per_s"] * none["step_s"]["median"])
        assert arm["tokens_per_s"] > 0 and arm["peak_bytes"] > arm["baseline_bytes"] and arm["plan_s"] > 0
        for phase in arm["phases"].values():
            assert 0 <= phase["bubble"]["median"] < 1 and 0 <= phase["padding"] < 1
            assert phase["busiest_s"]["median"] >= phase["busy_s"]["median"] > 0
    items = [{name: phase["items"] for name, phase in arm["phases"].items()} for arm in arms.values()]
    assert all(one == items[0] for one in items) and items[0]["llm"] == 6  # the same work in every arm
    _check_exchanges(arms)
    far, near = ([_moved(arm, f"bytes_{where}_nodes") for arm in (none, full)] for where in ("across", "within"))
    assert far[0] == 0 < far[1] and near == [0, 0]  # every rank is declared a node of its own


def _check_exchanges(arms: dict[str, Any]) -> None:
    """By the same plan, an all-gather of two ranks sends each rank's rows to the other, also those that stay."""
    assert arms["fsdp2/none"]["exchange_bytes"] == 0 < arms["fsdp2/all-gather"]["exchange_bytes"]
    assert 0 < _moved(arms["odc/full"], "bytes_across_nodes") < _moved(arms["fsdp2/all-gather"], "bytes_across_nodes")


def _moved(arm: dict[str, Any], key: str) -> float:
    return sum(phase[key] for phase in arm["phases"].values())


@pytest.mark.thorough
def test_one_arm_is_a_job_that_can_be_resumed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job, output = tiny_job(tmp_path).job, tmp_path / "out"
    options = ["--arm", "odc/full", "--model", job.model, "--data", job.data, "--minibatch-size", "6"]
    options += ["--output", str(output)]
    for steps, more in (("1", ["--save-every", "1"]), ("2", ["--resume", str(output)])):
        code, printed = odc("train-mm", *options, "--steps", steps, *more), capfd.readouterr()
        assert code == 0, printed.err
        assert printed.err.startswith(f"odc train-mm: odc/full, 2 ranks, {steps} steps\n")
        assert f"step {steps}: loss " in printed.out and f"checkpoints/step-0000000{steps}" in printed.out
    assert [json.loads(line)["step"] for line in (output / "steps.jsonl").read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"arm": "odc-equal"}, {"slow": "1:2"}, {"export": "x"}])
def test_what_a_multimodal_job_cannot_do(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert len(CompareConfig(MultimodalWorkload(tiny_job(tmp_path, output=str(tmp_path)))).arms) == 12
    with pytest.raises(ConfigError):
        tiny_job(tmp_path, **changes)
