"""When a read by NIXL is due, on a clock that is set by hand."""

from __future__ import annotations

import pytest

from odc.net.engines.pace import Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ends(pace: Pace, clock: Clock, begun: float, after: float, nbytes: int = 1000, rank: int = 1) -> None:
    clock.now = begun + after
    pace.ended(rank, nbytes, begun)


def test_of_an_unknown_read_nothing_is_expected(clock: Clock) -> None:
    pace = Pace(clock)
    assert pace.due(1, 1000, 100.0) == 100.0
    ends(pace, clock, 100.0, 8.0)
    assert pace.due(1, 999, 200.0) == pace.due(2, 1000, 200.0) == 200.0, "of other bytes, from another rank"


def test_a_read_is_due_shortly_before_it_ends(clock: Clock) -> None:
    pace = Pace(clock)
    ends(pace, clock, 100.0, 8.0)
    assert 206.0 < pace.due(1, 1000, 200.0) < 208.0


def test_the_second_of_two_is_due_after_the_first(clock: Clock) -> None:
    """Both begin at once and share the network: each takes 8 s, and is not expected to take the 16 s of both."""
    pace = Pace(clock)
    for begun in (100.0, 200.0, 300.0):
        ends(pace, clock, begun, 8.0)
        assert begun + 14.0 < pace.due(1, 1000, begun) < begun + 16.0
        ends(pace, clock, begun, 16.0)
    assert 406.0 < pace.due(1, 1000, 400.0) < 408.0


def test_a_sleeper_finds_out_that_reads_have_become_faster(clock: Clock) -> None:
    """A read that is looked at only when it is due seems to take as long as was expected of it."""
    pace = Pace(clock)
    ends(pace, clock, 100.0, 8.0)
    for turn in range(40):
        begun = 200.0 + 100 * turn
        ends(pace, clock, begun, max(1.0, pace.due(1, 1000, begun) - begun))
    assert pace.due(1, 1000, 9000.0) - 9000.0 <= 1.0


def test_one_slow_read_changes_little(clock: Clock) -> None:
    pace = Pace(clock)
    ends(pace, clock, 100.0, 8.0)
    ends(pace, clock, 200.0, 80.0)
    assert pace.due(1, 1000, 300.0) < 330.0
    for turn in range(40):
        ends(pace, clock, 400.0 + 100 * turn, 80.0)
    assert pace.due(1, 1000, 9000.0) > 9070.0, "where all are slow, it is expected"
