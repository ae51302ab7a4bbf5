"""Stages between sockets and a device: whose lanes they use."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import pytest
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


def test_stages_beyond_those_that_are_kept_use_the_same_lanes_again() -> None:
    stages, count = NamedStages(), staging._KEPT + 5
    names = lend(stages, count)
    assert len(names) == 2 * count, "two that are lent at once share no lane"
    assert lend(stages, count) == names
    assert lend(stages, count + 1) > names


def test_a_stage_that_cannot_be_made_leaves_its_lanes_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = NamedStages()

    def no_memory(*unused: object, **options: object) -> None:
        raise RuntimeError("out of pinned memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", no_memory)
        with pytest.raises(RuntimeError, match="pinned"):
            lend(stages, 1)
    failed = set(stages.lanes.names)
    assert failed < lend(stages, 1)
