"""How far a loader plans ahead of the training loop."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from odc.dispatch.loader import PlannedLoader

BATCHES = 20


class Planner:
    """Stands in for an orchestrator: a plan is the number of its batch."""

    def __init__(self) -> None:
        self.planned: list[int] = []

    def plan(self, records: int) -> Any:
        self.planned.append(records)
        return SimpleNamespace(planning_s=0.0)


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_batches_are_drawn_ahead_than_asked_for(monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """At rest `ahead` planned batches lie ready, and the thread holds one more, for which there is no room."""
    at_rest, planner, drawn = threading.Event(), Planner(), list[int]()

    class Watched(queue.Queue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            try:
                super().put(item, block, timeout)
            except queue.Full:
                at_rest.set()
                raise

    def batches() -> Iterator[int]:
        for number in range(BATCHES):
            drawn.append(number)
            yield number
        at_rest.set()

    monkeypatch.setattr(sys.modules[PlannedLoader.__module__].queue, "Queue", Watched)
    loader: PlannedLoader[int] = PlannedLoader(batches(), lambda batch: batch, planner, ahead=ahead)  # type: ignore
    iterator = iter(loader)
    for taken in (1, 2, 3):
        assert next(iterator)[0] == taken - 1
        at_rest.clear()
        at_rest.wait()
        assert planner.planned == drawn == list(range(taken + ahead + 1))
    assert [batch for batch, _ in iterator] == list(range(3, BATCHES))
