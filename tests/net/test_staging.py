"""Stages between sockets and a device: whose lanes they use."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from support.engines import StagesOfHosts

from odc.memory import HostLanes, Lanes
from odc.net.engines import staging

DEVICE = torch.device("cpu")


class NamedLanes(HostLanes):
    """Lanes of host memory whose names are noted, as `CudaLanes` keeps a stream for each."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def lane(self, name: str) -> AbstractContextManager[object]:
        self.names.append(name)
        return super().lane(name)


class NamedStages(StagesOfHosts):
    def __init__(self) -> None:
        super().__init__()
        self.lanes = NamedLanes()

    def _make_lanes(self, device: torch.device) -> Lanes:
        return self.lanes


def lend(stages: NamedStages, count: int) -> set[str]:
    """Names of all lanes that so many stages use, which are lent at once."""
    stages.lanes.names.clear()
    with contextlib.ExitStack() as stack:
        for lent in [stack.enter_context(stages.lend(DEVICE)) for _ in range(count)]:
            lent.settle()
    return set(stages.lanes.names)


def test_however_many_stages_are_lent_they_use_so_many_lanes() -> None:
    stages, count = NamedStages(), staging._KEPT + 5
    assert len(lend(stages, staging._LANES)) == 2 * staging._LANES, "two that are lent at once share no lane"
    names = lend(stages, count)
    assert len(names) == 2 * staging._LANES
    assert lend(stages, count) == names
    assert lend(NamedStages(), 3) < names, "another engine has no lanes of its own"
