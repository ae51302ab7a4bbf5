"""Time of each phase, from spans made by hand."""

from __future__ import annotations

import pytest

from odc.experiments.multimodal.workload import phase_times
from odc.trace import FETCH, MICROBATCH, WAIT, WINDOW, Span

MS = 1_000_000


def passes(*milliseconds: int, waits: dict[int, int] | None = None) -> list[Span]:
    """One rank's step: a pass after the other, of which some milliseconds at its end were waited; 0 leaves one out."""
    spans, at = [], 0
    for index, length in enumerate(milliseconds):
        if length:
            waited = (waits or {}).get(index, 0)
            spans.append(Span(WAIT, "main", (at + length - waited) * MS, (at + length) * MS, 1, index))
            spans.append(Span(MICROBATCH, "main", at * MS, (at + length) * MS, 1, index))
        spans.append(Span(FETCH, "main", (at + length) * MS, (at + length + 3) * MS, 1))  # an exchange between passes
        at += length + 3
    return [*spans, Span(WINDOW, "main", 0, at * MS, 1)]


def test_a_phase_is_its_forward_and_its_backward() -> None:
    spans = {0: passes(10, 20, 100, 40, 20), 1: passes(30, 0, 100, 0, 60, waits={4: 6})}
    times = phase_times(spans, 1)
    assert times["image"].busy_s == pytest.approx({0: 0.030, 1: 0.084})
    assert times["image"].spent_s == pytest.approx({0: 0.030, 1: 0.090})
    assert times["image"].bubble == pytest.approx(1 - 0.057 / 0.090)
    assert times["audio"].busy_s == pytest.approx({0: 0.060, 1: 0.0})
    assert times["audio"].bubble == pytest.approx(0.5)
    assert times["llm"].bubble == pytest.approx(0)


def test_a_phase_that_no_rank_ran_has_no_bubble() -> None:
    times = phase_times({0: passes(0, 20, 100, 40, 0), 1: passes(0, 20, 100, 40, 0)}, 1)
    assert times["image"].bubble == 0 and times["image"].busy_s == {0: 0.0, 1: 0.0}
    spans = {rank: [span._replace(epoch=2) for span in passes(10, 10, 10, 10, 10)] for rank in range(2)}
    assert all(time.spent_s == {0: 0.0, 1: 0.0} for time in phase_times(spans, 1).values()), "another step's"
