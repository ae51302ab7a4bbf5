"""Weights that one rank has for all: sent in the attempt of the first step, which a death repeats with all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recovering import Death, Fate
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import odc
from odc.experiments.launch import launch


def train(folder: str, deaths: tuple[Death, ...]) -> list[torch.Tensor]:
    """The program of docs/recovery.md; the rank's shards at the end. Without rank 0 the weights would be random."""
    rank = int(os.environ["RANK"])
    fate = Fate(rank, deaths, Path(folder))
    with odc.Recovery(rejoin_s=60) as recovery:
        torch.seed()
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        weights: dict[str, Any] = {name: torch.full_like(one, 0.5) for name, one in model.state_dict().items()}
        odc.fully_shard(model, settings=odc.Settings(reproducible=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fate.at("building")
        recovery.protect(model, optimizer)
        for step in recovery.steps(2):
            with recovery.attempt():
                fate.step = step
                if step == 0:
                    fate.at("load")
                    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                    set_model_state_dict(model, weights if rank == 0 else {}, options=options)
                    fate.at("loaded")
                with model.minibatch():
                    model(torch.arange(12.0).view(3, 4) + rank).square().sum().backward()
                optimizer.step()
        return [parameter.to_local().detach().clone() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return launch(train, str(tmp_path_factory.mktemp("undisturbed")), (), ranks=2)


@pytest.mark.parametrize(
    "deaths",
    [(Death(1, -1, "building"), Death(0, 0, "loaded")), (Death(1, 0, "load"),)],
    ids=["before the first state, and after", "in the broadcast"],
)
def test_weights_that_are_sent_in_the_first_attempt_survive(
    deaths: tuple[Death, ...], undisturbed: Any, tmp_path: Path
) -> None:
    found = launch(train, str(tmp_path), deaths, ranks=2, restarts=len(deaths))
    for mine, theirs in zip(found, undisturbed, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
