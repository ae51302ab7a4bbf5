"""Fits of a recorded trace: spans made by hand with known times."""

from __future__ import annotations

import pytest

from odc.balance import lb_mini, linear_cost
from odc.errors import TraceError
from odc.simulate.measured import fit_trace, microbatch_seconds
from odc.trace import FETCH, MAIN, MICROBATCH, WINDOW, Span

LENGTHS = {0: [100, 900, 40, 700], 1: [500, 20, 310, 800]}


def trace(seconds_per_token: float) -> tuple[dict[int, list[Span]], dict[int, object]]:
    """Spans of two ranks that fetch for 1 ms inside every microbatch, and the plans they ran."""
    plans = {epoch: lb_mini(lengths, 2, 1000) for epoch, lengths in LENGTHS.items()}
    spans: dict[int, list[Span]] = {0: [], 1: []}
    for epoch, plan in plans.items():
        for rank, own in enumerate(plan.ranks):
            at = epoch * 10_000_000_000
            begin = at
            for m, samples in enumerate(own):
                tokens = sum(LENGTHS[epoch][i] for i in samples)
                end = at + int(1e9 * (0.001 + tokens * seconds_per_token))
                spans[rank].append(Span(FETCH, MAIN, at + 10, at + 1_000_010, epoch, m))
                spans[rank].append(Span(MICROBATCH, MAIN, at, end, epoch, m))
                at = end + 5_000_000
            spans[rank].append(Span(WINDOW, MAIN, begin, at, epoch))
    return spans, plans


def test_a_trace_gives_its_cost_model_back() -> None:
    spans, plans = trace(1e-4)
    found = fit_trace(spans, plans, LENGTHS)  # type: ignore[arg-type]
    assert found.cost(1000) == pytest.approx(0.1, rel=1e-3)
    assert found.count == sum(len(own) for plan in plans.values() for own in plan.ranks)  # type: ignore[attr-defined]
    assert found.error < 1e-3
    assert fit_trace(spans, plans, LENGTHS, linear_cost).scale == pytest.approx(1e-4, rel=1e-3)  # type: ignore[arg-type]


def test_waiting_and_fetching_are_not_compute() -> None:
    spans, plans = trace(1e-4)
    for (epoch, rank, m), seconds in microbatch_seconds(spans).items():
        samples = plans[epoch].ranks[rank][m]  # type: ignore[attr-defined]
        assert seconds == pytest.approx(1e-4 * sum(LENGTHS[epoch][i] for i in samples), abs=1e-6)


def test_a_trace_of_something_else_is_refused() -> None:
    spans, _ = trace(1e-4)
    with pytest.raises(TraceError, match="no microbatch"):
        fit_trace(spans, {}, LENGTHS)
