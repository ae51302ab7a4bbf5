"""`odc train --recover`: a job that loses ranks ends as one that does not."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from support.recovering import Death, Fate
from support.tiny_job import tiny_job

from odc.errors import ConfigError
from odc.experiments import checkpoint, launch
from odc.experiments.config import JobConfig
from odc.experiments.job import RankJob, run, run_rank
from odc.experiments.text.step import TextWorkload
from odc.trace import RECOVERY, WINDOW, breakdown, load_spans, rank_file


def losses(results: list[Any]) -> list[list[float]]:
    return [[step.loss for step in result.steps] for result in results]


def steps_in(output: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (output / "steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_loses_a_rank_has_the_same_steps(rank: int, tmp_path: Path) -> None:
    config = tiny_job(tmp_path, steps=6, reproducible=True)
    undisturbed = run(TextWorkload(config))
    config = config.with_(spans=str(tmp_path / "spans"), recover=1, output=str(tmp_path / "out"))
    (tmp_path / "deaths").mkdir()
    deaths = (Death(rank, 2, "done"),)
    found = launch.launch(train, str(tmp_path / "deaths"), deaths, config, ranks=2, restarts=1)
    assert len(list((tmp_path / "deaths").iterdir())) == 1
    assert found == losses(undisturbed)
    assert steps_in(tmp_path / "out") == [1, 2, 3, 4, 5, 6]
    traces = {one: load_spans(rank_file(tmp_path / "spans", one)) for one in range(2)}
    assert [step.epoch for step in breakdown(traces).steps] == [1, 2, 3, 4, 5, 6], "of the killed process, too"
    for spans in traces.values():
        (recovery,) = [span for span in spans if span.category == RECOVERY]
        assert recovery.unit.startswith("generation 1, back to step ")
        after = [span.start_ns for span in spans if span.category == WINDOW and span.end_ns > recovery.start_ns]
        assert min(after) >= recovery.end_ns


def train(folder: str, deaths: Collection[Death], config: JobConfig) -> list[float]:
    """The program of a rank; returns its losses."""
    fate = Fate(int(os.environ["RANK"]), deaths, Path(folder))
    step = RankJob._step

    def begun(self: RankJob, number: int, first: int) -> None:
        fate.step = number
        step(self, number, first)
        fate.at("done")

    RankJob._step = begun  # type: ignore[method-assign]
    fate.watch(RankJob, "_resume", "resumed", after=True)
    fate.watch(checkpoint.state_dict_saver, "save", "saving")
    fate.watch(checkpoint, "_complete", "completing")
    return [one.loss for one in run_rank(TextWorkload(config)).steps]


def test_a_job_that_was_resumed_loses_ranks(tmp_path: Path) -> None:
    """Before its first step, and when a newer checkpoint is there than the one that it began with."""
    config = tiny_job(tmp_path, steps=6, reproducible=True, save_every=2, output=str(tmp_path / "out"))
    expected = losses(run(TextWorkload(config)))
    (tmp_path / "out" / "checkpoints" / "latest").write_text("step-00000002")
    again = config.with_(resume=str(tmp_path / "out"), recover=2)
    deaths = (Death(1, -1, "resumed"), Death(0, 4, "done"))
    (tmp_path / "deaths").mkdir()
    found = launch.launch(train, str(tmp_path / "deaths"), deaths, again, ranks=2, restarts=2)
    assert len(list((tmp_path / "deaths").iterdir())) == 2
    assert [one[-4:] for one in found] == [one[-4:] for one in expected]
    assert steps_in(tmp_path / "out") == [1, 2, 3, 4, 5, 6]


def test_a_rank_is_lost_while_a_checkpoint_is_saved(tmp_path: Path) -> None:
    config = tiny_job(tmp_path, steps=4, reproducible=True, save_every=2, recover=2, output=str(tmp_path / "out"))
    deaths = (Death(1, 1, "saving"), Death(0, 3, "completing"))
    (tmp_path / "deaths").mkdir()
    found = launch.launch(train, str(tmp_path / "deaths"), deaths, config, ranks=2, restarts=2)
    assert len(list((tmp_path / "deaths").iterdir())) == 2
    expected = losses(run(TextWorkload(config.with_(recover=0, output=None, save_every=0))))
    assert found == expected
    saved = [checkpoint.read_job(tmp_path / "out" / "checkpoints" / f"step-0000000{step}")["step"] for step in (2, 4)]
    assert saved == [2, 4]


def test_arms_that_cannot_recover_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="recover is for arms odc, odc-equal and odc-dynamic"):
        tiny_job(tmp_path, recover=1, arm="odc-split")


def test_a_job_goes_on_without_a_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each step has the same samples, whichever ranks train them, so the losses are the same but for rounding."""
    config = tiny_job(tmp_path, steps=6, ranks=3, reproducible=True)
    undisturbed = run(TextWorkload(config))
    fewer = config.with_(recover=1, fewest=2, rejoin_s=10.0, output=str(tmp_path / "out"))
    (tmp_path / "deaths").mkdir()
    deaths = (Death(0, 2, "done"), Death(0, 4, "done"))
    capfd.readouterr()
    found = launch.launch(train, str(tmp_path / "deaths"), deaths, fewer, ranks=3, restarts=1, fewest=2)
    assert len(list((tmp_path / "deaths").iterdir())) == 2
    assert len(found) == 2, "the first is replaced, the second is not"
    assert "step 6/6 " in capfd.readouterr().err, "of another rank 0 than the one that began"
    for mine, theirs in zip(found[0], losses(undisturbed)[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    assert steps_in(tmp_path / "out") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "wrong", [{"fewest": 2}, {"recover": 1, "fewest": 3}, {"recover": 1, "fewest": 1, "rejoin_s": 0}]
)
def test_fewest_takes_a_job_that_survives_deaths(wrong: dict[str, Any], tmp_path: Path) -> None:
    needs, most = "needs a job that survives deaths", "is at most the job's 2 ranks, and rejoin_s above 0"
    with pytest.raises(ConfigError, match=f"fewest ({needs}|{most})"):
        tiny_job(tmp_path, **wrong)
