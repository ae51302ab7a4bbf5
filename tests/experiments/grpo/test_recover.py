"""`odc grpo --recover`: a job that loses ranks ends with the bits of one that does not."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recovering import Death, Fate
from support.small_model import RolloutHere, toy

from odc.errors import ConfigError
from odc.experiments.grpo import GrpoConfig, GrpoWorkload, rollout
from odc.experiments.grpo import step as grpo
from odc.experiments.grpo.step import GrpoTrainer
from odc.experiments.job import RankJob, run_rank
from odc.experiments.launch import launch
from odc.fsdp.collect import Collector

STEPS = 4
DEATHS = {
    "rollout": [Death(0, 1, "rollout"), Death(1, 2, "rollout"), Death(0, 2, "samples")],
    "forward": [Death(1, 1, "forward"), Death(0, 2, "forward")],
    "optimizer step": [Death(0, 1, "updated"), Death(1, 3, "updated")],
    "first and last": [Death(1, 0, "rollout"), Death(0, 0, "forward"), Death(1, 3, "done")],
    "finish": [Death(0, 1, "finish"), Death(1, 2, "finish")],
}


def train(folder: str, deaths: Collection[Death], config: GrpoConfig, real: bool) -> dict[str, Any]:
    """The program of a rank; returns what must be equal after any deaths. `real`: a rollout process of its own."""
    fate, weights = Fate(int(os.environ["RANK"]), deaths, Path(folder)), list[torch.Tensor]()
    if not real:
        rollout.Rollout = RolloutHere  # type: ignore[assignment, misc]
    step, finish = RankJob._step, GrpoTrainer.finish

    def begun(self: RankJob, number: int, first: int) -> None:
        fate.step = number
        step(self, number, first)
        fate.at("done")

    def finished(self: GrpoTrainer) -> None:
        weights.extend(parameter.to_local().detach().clone() for parameter in self.model.parameters())
        finish(self)

    RankJob._step, GrpoTrainer.finish = begun, finished  # type: ignore[method-assign]
    fate.watch(rollout.SampleFeed, "_collected", "rollout")
    fate.watch(rollout.SampleFeed, "_collected", "samples", after=True)
    fate.watch(grpo, "token_log_probs", "forward", after=True)
    fate.watch(grpo, "update", "updated", after=True)
    fate.watch(Collector, "collect", "finish")
    found = run_rank(GrpoWorkload(config))
    figures = [(one.loss, one.kl, one.norm, one.reward, one.version, one.response_tokens) for one in found.steps]
    return {"weights": weights, "figures": figures}


def run(folder: Path, config: GrpoConfig, deaths: Sequence[Death] = (), real: bool = False) -> Any:
    folder.mkdir()
    return launch(train, str(folder), tuple(deaths), config, real, ranks=config.ranks, restarts=config.recover)


def config(folder: Path, lag: int = 0) -> GrpoConfig:
    fields: dict[str, Any] = {"minibatches": 2, "kl": 0.05, "reproducible": True, "recover": 3, "lag": lag}
    return toy(folder, steps=STEPS, timeout_s=100.0, **fields)


def assert_equal(found: Any, undisturbed: Any) -> None:
    for mine, theirs in zip(found, undisturbed, strict=True):
        assert mine["figures"] == theirs["figures"] and len(mine["figures"]) == STEPS
        assert mine["weights"] and all(
            torch.equal(a, b) for a, b in zip(mine["weights"], theirs["weights"], strict=True)
        )


@pytest.fixture(scope="module")
def lagged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[GrpoConfig, Any]]:
    """The job whose rollouts lag by so many steps, and what a rank returns that nothing befell."""

    @functools.cache
    def of(lag: int) -> tuple[GrpoConfig, Any]:
        folder = tmp_path_factory.mktemp("undisturbed")
        given = config(folder, lag)
        return given, run(folder / "none", given)

    return of


@pytest.mark.parametrize(
    ("name", "lag"),
    [
        ("rollout", 0),
        ("optimizer step", 1),
        *(
            pytest.param(*one, marks=pytest.mark.thorough)
            for one in (("forward", 1), ("first and last", 0), ("finish", 1))
        ),
    ],
)
def test_a_job_that_loses_ranks_has_the_same_bits(
    name: str, lag: int, lagged: Callable[[int], tuple[GrpoConfig, Any]], tmp_path: Path
) -> None:
    """Also the versions of the weights that rollouts read are those of the job alone."""
    deaths, (given, undisturbed) = DEATHS[name], lagged(lag)
    found = run(tmp_path / "deaths", given, deaths)
    assert len(list((tmp_path / "deaths").iterdir())) == len(deaths)
    assert_equal(found, undisturbed)


def test_a_rollout_process_begins_anew_with_each_generation(tmp_path: Path) -> None:
    given = config(tmp_path).with_(minibatches=1)  # a process that reads beside two may find a newer version
    deaths = [Death(1, 1, "rollout"), Death(0, 2, "forward")]
    undisturbed = run(tmp_path / "none", given, real=True)
    assert_equal(run(tmp_path / "deaths", given, deaths, real=True), undisturbed)


@pytest.mark.thorough
def test_one_of_three_ranks_is_lost_while_the_others_wait_for_samples(tmp_path: Path) -> None:
    given = config(tmp_path).with_(ranks=3)
    deaths = [Death(2, 1, "rollout"), Death(1, 2, "rollout"), Death(0, 3, "rollout")]
    undisturbed = run(tmp_path / "none", given)
    assert_equal(run(tmp_path / "deaths", given, deaths), undisturbed)


def test_arms_that_cannot_recover_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="recover is for arms odc and odc-equal, not fsdp2"):
        toy(tmp_path, recover=1, arm="fsdp2")
