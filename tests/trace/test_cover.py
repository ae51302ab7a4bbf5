from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.errors import TraceError
from odc.trace import COMPUTE, FETCH, IDLE, MICROBATCH, OPTIMIZER, PUSH, WAIT, WINDOW, Span
from odc.trace.cover import cover, marked_epochs

LAST = 30


@st.composite
def any_span(draw):
    start = draw(st.integers(0, LAST - 1))
    return Span(
        draw(st.sampled_from([FETCH, PUSH, WAIT, OPTIMIZER, COMPUTE, IDLE, WINDOW, MICROBATCH])),
        draw(st.sampled_from(["main", "main", "main", "fetch"])),
        start,
        draw(st.integers(start, LAST)),
        draw(st.integers(0, 2)),
        draw(st.integers(-1, 2)),
    )


def expected_at(moment, spans, marked):
    """The definition, moment by moment: what a reader would take the thread to be doing."""
    over = [span for span in spans if span.lane == "main" and span.start_ns <= moment < span.end_ns]
    doing = [span for span in over if span.category not in (WINDOW, MICROBATCH)]
    if doing:
        latest = max(span.start_ns for span in doing)
        inner = [span for span in doing if span.start_ns == latest]
        return min(inner, key=lambda span: span.end_ns).category
    if any(span.category == MICROBATCH or span.epoch not in marked for span in over):
        return COMPUTE
    return None


@given(st.lists(any_span(), max_size=12), st.frozensets(st.integers(0, 2)))
def test_every_moment_counts_once_and_as_defined(spans, marked):
    pieces = cover(spans, marked)
    for before, after in pairwise(pieces):
        assert before.end_ns <= after.start_ns
    assert all(piece.start_ns < piece.end_ns for piece in pieces)
    for moment in range(LAST):
        found = [piece.category for piece in pieces if piece.start_ns <= moment < piece.end_ns]
        expected = expected_at(moment, spans, marked)
        assert found == ([] if expected is None else [expected])


def test_the_innermost_span_wins_and_the_outer_goes_on():
    spans = [
        Span(WAIT, "main", 12, 15, 1, 0, "", 3),
        Span(FETCH, "main", 10, 20, 1, 0, "layers.0", -1, 64),
        Span(MICROBATCH, "main", 5, 30, 1, 0),
        Span(WINDOW, "main", 0, 40, 1),
    ]
    assert cover(spans, marked_epochs({0: spans})) == [
        Span(COMPUTE, "main", 5, 10, 1, 0),
        Span(FETCH, "main", 10, 12, 1, 0, "layers.0", -1, 64),
        Span(WAIT, "main", 12, 15, 1, 0, "", 3),
        Span(FETCH, "main", 15, 20, 1, 0, "layers.0", -1, 64),
        Span(COMPUTE, "main", 20, 30, 1, 0),
    ]


def test_of_two_equal_spans_the_one_recorded_first_is_the_inner_one():
    assert [piece.category for piece in cover([Span(WAIT, "main", 0, 5), Span(FETCH, "main", 0, 5)], frozenset())] == [
        WAIT
    ]


def test_marks_of_any_rank_make_an_epoch_a_marked_one():
    spans = {0: [Span(MICROBATCH, "main", 0, 5, 1)], 1: [Span(WINDOW, "main", 0, 9, 1), Span(WINDOW, "main", 9, 20, 2)]}
    assert marked_epochs(spans) == {1}
    assert cover(spans[1], marked_epochs(spans)) == [Span(COMPUTE, "main", 9, 20, 2)]


def test_an_unknown_category_is_refused_on_the_main_lane_only():
    assert cover([Span("tokenize", "loader", 0, 5)], frozenset()) == []
    with pytest.raises(TraceError, match="'tokenize'"):
        cover([Span("tokenize", "main", 0, 5)], frozenset())
