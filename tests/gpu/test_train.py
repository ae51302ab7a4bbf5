"""`odc train` and `odc compare` on CUDA: as on the CPU, but for rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the train extra")

from support.tiny_job import tiny_job

from odc.experiments.compare import CompareConfig, run_arms, write_pictures
from odc.experiments.job import run
from odc.experiments.report import report
from odc.experiments.text.step import TextWorkload


@pytest.fixture(autouse=True)
def _needs_a_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_arms_train_as_on_the_cpu(tmp_path: Path, precision: str) -> None:
    arms = ("odc-equal", "odc", "odc-dynamic")
    if torch.cuda.device_count() >= 2:
        arms = ("fsdp2", "fsdp2-resident", *arms)
    expected = [step.loss for step in run(TextWorkload(tiny_job(tmp_path, arm="odc", precision=precision)))[0].steps]
    config = CompareConfig(
        TextWorkload(tiny_job(tmp_path, device="cuda", precision=precision, output=str(tmp_path / "out"))), arms
    )
    runs = run_arms(config, print)
    near = {"rel": 2e-2} if precision == "bf16" else {"rel": 1e-3}
    for arm, (only,) in runs.items():
        assert only.losses == pytest.approx(expected, **near), arm
        assert all(result.peak_bytes > result.baseline_bytes for result in only.results), "nothing lies on the device"
    figures = report(config, runs, ["odc", "compare"])
    assert figures["machine"]["devices"], "a device has a name"
    for arm in arms:
        assert 0 < figures["arms"][arm]["bubble"]["median"] < 1, arm
    assert {f"trace {arm}" for arm in arms} <= write_pictures(config, runs).keys()


def test_a_job_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    whole = run(TextWorkload(tiny_job(tmp_path, device="cuda", steps=4, output=str(tmp_path / "whole"))))[0].steps
    first = str(tmp_path / "first")
    run(TextWorkload(tiny_job(tmp_path, device="cuda", steps=4, save_every=2, output=first)))
    (tmp_path / "first" / "checkpoints" / "latest").write_text("step-00000002\n")
    resumed = run(TextWorkload(tiny_job(tmp_path, device="cuda", steps=4, resume=first)))[0].steps
    assert [step.loss for step in resumed] == pytest.approx([step.loss for step in whole[2:]], rel=1e-5)
