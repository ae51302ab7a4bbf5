from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from odc.bench.ranks import RankPool
from odc.bench.rounds import Action, Timed, measure, slowest


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Of two ranks, for all tests of this file; one that has failed ranks comes last."""
    with RankPool(2) as two:
        yield two


calls: list[str] = []
spent: list[float] = []  # seconds that each ten sleeps took together


def sleep_ten_times() -> None:
    began = time.perf_counter()
    for _ in range(10):
        time.sleep(0.001)
    spent.append(time.perf_counter() - began)


def recorded(nbytes: int, device: str) -> list[Action]:
    calls.clear()
    spent.clear()
    return [
        Action("a", lambda: calls.append("a"), nbytes, ("b",), after=lambda: calls.append("undone")),
        Action("b", sleep_ten_times, times=10, after=lambda: calls.append("b")),
    ]


def counted(nbytes: int, device: str) -> tuple[list[Timed], list[str], list[float]]:
    timed = measure(recorded, nbytes, device, rounds=3, warm=2)
    return timed, list(calls), spent[2:]


def test_actions_take_turns_and_only_they_are_timed(pool: RankPool) -> None:
    for timed, order, whole in pool.each(counted, 64, "cpu"):
        assert order == ["a", "undone", "b"] * 5
        assert [(one.name, one.nbytes, one.against, len(one.seconds)) for one in timed] == [
            ("a", 64, ("b",), 3),
            ("b", 0, (), 3),
        ]
        of_ten = zip(timed[1].seconds, whole, strict=True)
        assert all(0.001 <= seconds < ten / 2 for seconds, ten in of_ten), "of one time, not of ten"


def test_of_each_round_the_slowest_rank_counts() -> None:
    one, other = ([Timed("a", 8, (), seconds)] for seconds in ([1.0, 5.0], [2.0, 4.0]))
    assert slowest([one, other]) == [Timed("a", 8, (), [2.0, 5.0])]


def refusing(nbytes: int, device: str) -> list[Action]:
    def refuse() -> None:
        calls.append("asked")
        raise RuntimeError("not here\nstack")

    calls.clear()
    slow = Action("slow", lambda: calls.append("slow"), most=1)
    return [Action("a", time.time, nbytes, ("b",)), Action("b", refuse, optional=True), slow]


def refused(nbytes: int, device: str) -> tuple[list[Timed], list[str]]:
    return measure(refusing, nbytes, device, rounds=3, warm=1), list(calls)


def test_a_baseline_may_refuse_and_a_slow_one_has_fewer_rounds(pool: RankPool) -> None:
    for (own, baseline, slow), order in pool.each(refused, 64, "cpu"):
        assert order == ["asked", "slow", "slow"]
        assert (len(own.seconds), own.refused) == (3, "")
        assert (baseline.seconds, baseline.refused) == ([], "RuntimeError: not here")
        assert len(slow.seconds) == 1


def test_what_odc_does_may_not_refuse(pool: RankPool) -> None:
    with pytest.raises(RuntimeError, match="not here"):
        pool.each(measure, must, 64, "cpu", 1, 0)


def must(nbytes: int, device: str) -> list[Action]:
    return [replace(refusing(nbytes, device)[1], optional=False)]


def test_ranks_that_measured_otherwise_are_not_mixed() -> None:
    with pytest.raises(ValueError):
        slowest([[Timed("a", 8, (), [1.0])], []])
    with pytest.raises(ValueError):
        slowest([[Timed("a", 8, (), [1.0])], [Timed("a", 8, (), [1.0, 2.0])]])
