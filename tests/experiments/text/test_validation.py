"""The loss of a validation set: the same under every arm, and training goes on as if there had been none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import tiny_job as here
from support.tiny_job import tiny_job

from odc.arms import ArmName
from odc.experiments.config import JobConfig
from odc.experiments.results import JobResult
from odc.experiments.text import validation
from odc.experiments.text.step import TextStep

pytest.importorskip("transformers", reason="needs the train extra")

Pools = Callable[[int], Any]


def run_job(rank: int, world: int, config: JobConfig, at_once: int) -> JobResult[TextStep]:
    """The job, with validation planned for `at_once` documents at a time."""
    whole, validation._AT_ONCE = validation._AT_ONCE, at_once
    try:
        return here.run_job(rank, world, config)
    finally:
        validation._AT_ONCE = whole


def measure(ranks: Pools, tmp_path: Path, arms: tuple[ArmName, ...]) -> None:
    plain = tiny_job(tmp_path, steps=3)
    (tmp_path / "valid.jsonl").write_text('{"text": "a"}\n' * 3 + '{"text": "' + "abcdefgh " * 10 + '"}\n')
    expected = ranks(2).run(run_job, plain, 256)[0].steps
    assert {step.valid_loss for step in expected} == {None}
    seen = []
    for arm in arms:
        job = plain.with_(arm=arm, valid=str(tmp_path / "valid.jsonl"), valid_every=1)
        job = job.with_(output=str(tmp_path / arm), save_every=2)
        at_once = 1 if arm == "odc" else 256  # one document at a time: a rank has none of it
        mine, theirs = (result.steps for result in ranks(2).run(run_job, job, at_once))
        assert [step.valid_loss for step in mine] == [step.valid_loss for step in theirs]
        assert [step.loss for step in mine] == pytest.approx([step.loss for step in expected], rel=1e-4), arm
        for step in mine:
            assert step.bubble is not None and 0 < step.bubble < 1 - 1e-4, f"{arm}: a window reached into the step"
        seen.append([step.valid_loss for step in mine])
    for losses in seen:
        assert losses == pytest.approx(seen[0], rel=1e-4)
        assert losses[2] < losses[0] < math.log(259) + 1


def test_both_transports_measure_the_same_and_train_on_as_before(ranks: Pools, tmp_path: Path) -> None:
    measure(ranks, tmp_path, ("fsdp2", "odc"))


@pytest.mark.thorough
def test_so_do_the_other_arms(ranks: Pools, tmp_path: Path) -> None:
    measure(ranks, tmp_path, ("fsdp2-resident", "odc-equal", "odc-dynamic"))


def test_it_is_due_every_so_many_steps_and_at_the_end(ranks: Pools, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, steps=3)
    valid = job.with_(valid=job.data)
    for every, due in ((2, [False, True, True]), (0, [False, False, True])):
        result = ranks(1).run(run_job, replace(valid, ranks=1, valid_every=every), 256)[0]
        assert [step.valid_loss is not None for step in result.steps] == due
