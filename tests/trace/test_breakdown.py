from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.errors import TraceError
from odc.trace import (
    CATEGORIES,
    COMPUTE,
    FETCH,
    IDLE,
    MICROBATCH,
    OPTIMIZER,
    PUSH,
    WAIT,
    WINDOW,
    Span,
    breakdown,
)

MS = 1_000_000


def two_ranks(epoch=0, at=0):
    """Rank 0 fetches with a wait inside and steps after its window; rank 1 starts late and has less to do."""
    return {
        0: [
            Span(WAIT, "main", at + 12 * MS, at + 15 * MS, epoch, 0, "", 1),
            Span(FETCH, "main", at + 10 * MS, at + 20 * MS, epoch, 0, "a"),
            Span(MICROBATCH, "main", at + 5 * MS, at + 60 * MS, epoch, 0),
            Span(PUSH, "push", at, at + 60 * MS, epoch, 0),
            Span(WINDOW, "main", at, at + 70 * MS, epoch),
            Span(OPTIMIZER, "main", at + 75 * MS, at + 85 * MS, epoch),
        ],
        1: [
            Span(MICROBATCH, "main", at + 10 * MS, at + 40 * MS, epoch, 0),
            Span(WAIT, "main", at + 40 * MS, at + 70 * MS, epoch, -1, "", 0),
            Span(WINDOW, "main", at + 10 * MS, at + 70 * MS, epoch),
            Span(OPTIMIZER, "main", at + 70 * MS, at + 95 * MS, epoch),
        ],
    }


def joined(*traces):
    return {rank: [span for trace in traces for span in trace[rank]] for rank in traces[0]}


def test_by_hand():
    (step,) = breakdown(two_ranks()).steps
    assert (step.start_ns, step.end_ns, step.step_s) == (0, 95 * MS, 0.095)
    milliseconds = {rank: {name: ns / MS for name, ns in row.items()} for rank, row in step.nanoseconds.items()}
    assert milliseconds == {
        0: {COMPUTE: 45, OPTIMIZER: 10, FETCH: 7, PUSH: 0, WAIT: 3, IDLE: 30},
        1: {COMPUTE: 30, OPTIMIZER: 25, FETCH: 0, PUSH: 0, WAIT: 30, IDLE: 10},
    }
    assert step.bubble == pytest.approx(1 - 55 / 95)


@st.composite
def any_trace(draw):
    """Ranks with windows in a row, each full of spans of every kind, nested, overlapping and reaching outside."""
    ranks = draw(st.integers(1, 3))
    epochs = draw(st.integers(1, 3))
    trace = {}
    for rank in range(ranks):
        at, spans = 0, []
        for epoch in range(epochs):
            start = at + draw(st.integers(0, 10))
            at = start + draw(st.integers(1, 40))
            spans.append(Span(WINDOW, "main", start, at, epoch))
            for _ in range(draw(st.integers(0, 8))):
                begin = draw(st.integers(max(0, start - 5), at + 5))
                category = draw(st.sampled_from([FETCH, PUSH, WAIT, OPTIMIZER, MICROBATCH]))
                lane = draw(st.sampled_from(["main", "main", "push"]))
                spans.append(Span(category, lane, begin, begin + draw(st.integers(0, 20)), epoch))
        trace[rank] = spans
    return trace


@given(any_trace())
def test_every_rank_adds_up_to_the_step(trace):
    for step in breakdown(trace).steps:
        assert set(step.nanoseconds) == set(trace)
        for row in step.nanoseconds.values():
            assert set(row) == set(CATEGORIES)
            assert min(row.values()) >= 0
            assert sum(row.values()) == step.end_ns - step.start_ns
        assert 0 <= step.bubble <= 1


@given(any_trace())
def test_background_lanes_never_count(trace):
    main_only = {rank: [span for span in spans if span.lane == "main"] for rank, spans in trace.items()}
    assert breakdown(trace) == breakdown(main_only)


def test_without_microbatch_marks_compute_is_the_rest_of_the_window():
    trace = {rank: [s for s in spans if s.category != MICROBATCH] for rank, spans in two_ranks().items()}
    (step,) = breakdown(trace).steps
    assert step.nanoseconds[0][COMPUTE] == 60 * MS
    assert step.nanoseconds[1][COMPUTE] == 30 * MS


def test_a_rank_without_microbatches_is_idle_while_another_computes():
    trace = two_ranks()
    trace[1] = [span for span in trace[1] if span.category != MICROBATCH]
    (step,) = breakdown(trace).steps
    assert step.nanoseconds[1][COMPUTE] == 0
    assert step.nanoseconds[1][IDLE] == 40 * MS


def test_medians_over_epochs_with_min_and_max():
    longer = {rank: list(spans) for rank, spans in two_ranks(2, 400 * MS).items()}
    longer[1][-1] = longer[1][-1]._replace(end_ns=500 * MS)
    result = breakdown(joined(two_ranks(0), two_ranks(1, 200 * MS), longer))
    assert result.step_s.to_dict() == {"median": 0.095, "min": 0.095, "max": 0.1}
    assert [step.nanoseconds[1][OPTIMIZER] for step in result.steps] == [25 * MS, 25 * MS, 30 * MS]
    assert [step.mean_s(OPTIMIZER) for step in result.steps[:2]] == [0.0175, 0.0175]
    assert result.busy(1).median == pytest.approx(55 / 95)


def test_skip_and_what_not_every_rank_recorded():
    trace = joined(*(two_ranks(epoch, 200 * MS * epoch) for epoch in range(4)))
    trace[1] = [span for span in trace[1] if span.epoch != 3 or span.category != WINDOW]
    result = breakdown(trace, skip=1)
    assert [step.epoch for step in result.steps] == [1, 2]
    assert (result.skipped, result.left_out) == ((0,), (3,))
    with pytest.raises(TraceError, match="3 minibatches were recorded completely on all 2 ranks, and 3 are skipped"):
        breakdown(trace, skip=3)
    with pytest.raises(ValueError, match="skip"):
        breakdown(trace, skip=-1)


@pytest.mark.parametrize("trace", [{}, {0: []}, {0: two_ranks()[0], 1: []}])
def test_nothing_to_break_down(trace):
    with pytest.raises(TraceError, match="nothing is left"):
        breakdown(trace)


def test_nested_windows_of_one_epoch_are_one_and_windows_apart_are_refused():
    trace = two_ranks()
    trace[0].append(Span(WINDOW, "main", 2 * MS, 69 * MS, 0))
    assert breakdown(trace) == breakdown(two_ranks())
    with pytest.raises(TraceError, match="epoch 0 was recorded twice"):
        breakdown(joined(two_ranks(0), two_ranks(0, 200 * MS)))
