"""How far a loader plans ahead of the training loop."""

from __future__ import annotations

import queue
import sys
import threading
import time
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


def records_of(batch: int) -> Any:
    return batch


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_batches_are_drawn_ahead_than_asked_for(monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """At rest `ahead` planned batches lie ready, and the thread holds one more, for which there is no room."""
    planner, drawn, refused, ended = Planner(), list[int](), list[int](), threading.Event()

    class Watched(queue.Queue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            try:
                super().put(item, block, timeout)
            except queue.Full:
                refused.append(len(drawn))
                raise

    def batches() -> Iterator[int]:
        for number in range(BATCHES):
            drawn.append(number)
            yield number
        ended.set()

    def rest() -> None:
        """Return when the thread has twice found no room: once may have been before the last batch was taken."""
        enough = len(refused) + 2
        while len(refused) < enough and not ended.is_set():
            time.sleep(0.001)

    monkeypatch.setattr(sys.modules[PlannedLoader.__module__].queue, "Queue", Watched)
    stand_in: Any = planner
    loader: PlannedLoader[int] = PlannedLoader(batches(), records_of, stand_in, ahead=ahead)
    iterator = iter(loader)
    for taken in (1, 2):
        assert next(iterator)[0] == taken - 1
        rest()
        assert planner.planned == drawn == list(range(taken + ahead + 1))
    assert [batch for batch, _ in iterator] == list(range(2, BATCHES))
