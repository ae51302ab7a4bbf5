"""How far a loader plans ahead of the training loop, and what follows a loop that is left early."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.doubles import exchange_of
from support.on_ranks import on_ranks
from support.toy import ENCODERS

from odc.dispatch import BalancePolicy, Phase, Records
from odc.dispatch.loader import PlannedLoader
from odc.dispatch.orchestrator import Orchestrator, channels
from odc.worker import Job, Worker

BATCHES = 20


class Planner:
    """Stands in for an orchestrator: a plan is the number of its batch."""

    def __init__(self) -> None:
        self.planned: list[int] = []
        self.refused: list[str] = []

    def plan(self, records: int) -> Any:
        self.planned.append(records)
        return SimpleNamespace(planning_s=0.0)

    def refuse(self, reason: str) -> None:
        self.refused.append(reason)


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("odc.dispatch.loader.Worker", Watched)
        loader: PlannedLoader[int] = PlannedLoader(batches(), records_of, stand_in, ahead=ahead)
        iterator = iter(loader)
        for taken in (1, 2):
            assert next(iterator)[0] == taken - 1
            workers[0].submit(last := Job(lambda: None))
            assert last.over(60.0)
            assert planner.planned == drawn == list(range(taken + ahead + 1))
    assert [batch for batch, _ in iterator] == list(range(2, BATCHES))


def test_closing_waits_for_what_was_planned_ahead_of_a_loop_that_was_left() -> None:
    planner = Planner()

    def slow(batch: int) -> Any:
        time.sleep(0.05)
        return records_of(batch)

    stand_in: Any = planner
    loader: PlannedLoader[int] = PlannedLoader(range(BATCHES), slow, stand_in, ahead=2)
    for batch, _ in loader:
        assert batch == 0
        break
    loader.close()
    assert planner.planned == [0, 1, 2, 3]
    assert [batch for batch, _ in loader] == list(range(BATCHES))


@pytest.mark.parametrize("closed", [False, True])
def test_loops_over_one_iterator_lose_no_batch(closed: bool) -> None:
    """What the thread drew ahead of a loop that was left comes first in the next one, planned at its own steps."""
    planner: Any = Planner()
    loader: PlannedLoader[int] = PlannedLoader(iter(range(BATCHES)), records_of, planner, ahead=2)
    seen = list[int]()
    for taken in (1, 2, BATCHES):
        for number, (batch, _) in enumerate(loader, 1):
            seen.append(batch)
            if number == taken:
                break
        if closed:
            loader.close()
    assert seen == list(range(BATCHES))
    assert planner.planned[:8] == [0, 1, 2, 3, 1, 2, 3, 4]
    assert list(loader) == []


def test_a_batch_refused_ahead_of_a_loop_that_was_left_is_refused_in_the_next() -> None:
    def refuses(batch: int) -> Any:
        if batch == 1:
            raise ValueError("bad batch 1")
        return batch

    planner: Any = Planner()
    loader: PlannedLoader[int] = PlannedLoader(iter(range(5)), refuses, planner)
    assert next(iter(loader))[0] == 0
    with pytest.raises(ValueError, match="bad batch 1"):
        next(iter(loader))
    assert [batch for batch, _ in loader] == [2, 3, 4]


def test_what_was_raised_ahead_of_a_loop_that_was_left_is_raised_in_the_next() -> None:
    def draws() -> Iterator[int]:
        yield from (0, 1)
        raise OSError("2.png is truncated")

    planner: Any = Planner()
    loader: PlannedLoader[int] = PlannedLoader(draws(), records_of, planner, ahead=2)
    assert next(iter(loader))[0] == 0
    loader.close()
    following = iter(loader)
    assert next(following)[0] == 1
    with pytest.raises(OSError, match=r"2\.png is truncated"):
        next(following)
    assert planner.refused == ["OSError: 2.png is truncated"] * 2
    assert list(loader) == []


def test_a_batch_that_cannot_be_drawn_is_refused_on_every_rank() -> None:
    """Other ranks would wait for its records until this one ends."""

    def draws() -> Iterator[int]:
        yield 0
        raise OSError("2.png is truncated")

    planner: Any = Planner()
    planned = iter(PlannedLoader(draws(), records_of, planner))
    assert next(planned)[0] == 0
    with pytest.raises(OSError, match=r"2\.png is truncated"):
        next(planned)
    assert planner.refused == ["OSError: 2.png is truncated"]


class Slower:
    """Examples of one batch after the other, the second later on rank 1; the third sets `ahead`."""

    def __init__(self, rank: int) -> None:
        self.rank, self.ahead = rank, threading.Event()

    def __iter__(self) -> Iterator[list[Any]]:
        for number in range(6):
            if number == 1 and self.rank == 1:
                time.sleep(0.3)
            if number == 2:
                self.ahead.set()
            yield [[("text", 5), ("vision", 10, 5)]] * (number + 1)


@pytest.mark.parametrize("kind", ["collective", "on_demand"])
@on_ranks(2)
def test_a_loop_that_is_left_early_is_followed_by_another(rank: int, world: int, kind: str) -> None:
    """Rank 0 leaves it before its thread has planned ahead, rank 1 after."""
    batches = Slower(rank)
    with exchange_of(kind, rank, world, channels(ENCODERS)) as exchange:
        phases = [Phase(name, BalancePolicy()) for name in ENCODERS]
        planner = Orchestrator(phases, Phase("llm", BalancePolicy()), exchange)
        loader = PlannedLoader(batches, lambda batch: Records.of(batch, ENCODERS), planner)
        for _ in loader:
            assert rank == 0 or batches.ahead.wait(60.0)
            break
        steps = []
        for batch, plan in loader:
            assert plan.whole.llm.counts.tolist() == [len(batch)] * world
            steps.append(plan.step)
        assert steps == list(range(4, 10))
