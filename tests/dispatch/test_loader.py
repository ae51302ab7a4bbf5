"""How far a loader plans ahead of the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from odc.dispatch.loader import PlannedLoader
from odc.worker import Job, Worker

BATCHES = 20


class Planner:
    """Stands in for an orchestrator: a plan is the number of its batch."""

    def __init__(self) -> None:
        self.planned: list[int] = []

    def plan(self, records: int) -> Any:
        self.planned.append(records)
        return SimpleNamespace(planning_s=0.0)


def records_of(batch: int) -> Any:
    return batch


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_batches_are_drawn_ahead_than_asked_for(ahead: int) -> None:
    """At rest `ahead` planned batches lie ready, and one more."""
    planner, drawn, workers = Planner(), list[int](), list[Worker]()

    def batches() -> Iterator[int]:
        for number in range(BATCHES):
            drawn.append(number)
            yield number

    class Watched(Worker):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            workers.append(self)

    stand_in: Any = planner
    loader: PlannedLoader[int] = PlannedLoader(batches(), records_of, stand_in, ahead=ahead)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("odc.dispatch.loader.Worker", Watched)
        iterator = iter(loader)
        for taken in (1, 2):
            assert next(iterator)[0] == taken - 1
            workers[0].submit(last := Job(lambda: None))
            assert last.over(60.0)
            assert planner.planned == drawn == list(range(taken + ahead + 1))
    assert [batch for batch, _ in iterator] == list(range(2, BATCHES))
