"""`odc train --recover --keep buddy` over several hosts, each rank started again by its host's launcher."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hosts import Hosts, need_hosts
from support.recovering import Death, Fate
from support.recovering_hosts import Launch, run_program_on
from support.tiny_job import tiny_job

from odc.errors import ConfigError
from odc.experiments.config import JobConfig
from odc.experiments.job import RankJob, run_rank
from odc.experiments.text.step import TextTrainer, TextWorkload
from odc.fsdp.collect import Collector


def train(folder: str, deaths: Collection[Death], config: JobConfig) -> dict[str, Any]:
    """The program of a rank, as `odc train` runs it under torchrun; returns what must be equal after any deaths."""
    fate, weights = Fate(int(os.environ["RANK"]), deaths, Path(folder)), list[torch.Tensor]()
    step, finish = RankJob._step, TextTrainer.finish

    def begun(self: RankJob, number: int, first: int) -> None:
        fate.step = number
        step(self, number, first)
        fate.at("step")

    def finished(self: TextTrainer) -> None:
        weights.extend(parameter.to_local().detach().clone() for parameter in self.model.parameters())
        finish(self)

    RankJob._step, TextTrainer.finish = begun, finished  # type: ignore[method-assign]
    fate.watch(Collector, "collect", "finish")
    found = run_rank(TextWorkload(config))
    return {"weights": weights, "losses": [one.loss for one in found.steps]}


def test_a_whole_host_comes_back_from_its_buddies(tmp_path: Path) -> None:
    need_hosts()
    config = tiny_job(tmp_path, steps=6, ranks=4, reproducible=True, recover=1, keep="buddy")
    deaths = [Death(2, 2, "finish"), Death(3, 2, "finish"), Death(0, 4, "step"), Death(1, 4, "step")]
    with Hosts(2) as hosts:
        launches = [Launch(ranks, 2 * len(deaths)) for ranks in ([0, 1], [2, 3])]
        undisturbed = run_program_on(hosts, 2, launches, False, train, tmp_path / "undisturbed", (), config)
        found = run_program_on(hosts, 2, launches, False, train, tmp_path / "deaths", deaths, config)
    assert len(list((tmp_path / "deaths").iterdir())) == len(deaths)
    for mine, theirs in zip(found, undisturbed, strict=True):
        assert len(mine["losses"]) == 6 and mine["losses"] == theirs["losses"]
        assert all(torch.equal(a, b) for a, b in zip(mine["weights"], theirs["weights"], strict=True))


def test_buddies_without_recovery_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep needs a job that survives deaths"):
        tiny_job(tmp_path, keep="buddy")
