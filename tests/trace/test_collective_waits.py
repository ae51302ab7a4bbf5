from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from odc.trace import COLLECTIVE, FETCH, MICROBATCH, PUSH, WAIT, WINDOW, Span, breakdown, split_waits


def gather(start, end, epoch=0, unit="a", category=FETCH):
    return Span(category, "main", start, end, epoch, 0, unit, COLLECTIVE, 64)


def test_the_last_arrival_splits_each_span():
    split = split_waits({0: [gather(0, 20)], 1: [gather(15, 21)], 2: [gather(4, 20)]})
    assert split.unsplit == ()
    assert split.spans_by_rank == {
        0: [Span(WAIT, "main", 0, 15, 0, 0, "a", 1, 0), gather(15, 20)],
        1: [gather(15, 21)],
        2: [Span(WAIT, "main", 4, 15, 0, 0, "a", 1, 0), gather(15, 20)],
    }


def test_calls_are_matched_by_epoch_category_unit_and_order():
    first = {
        0: [gather(0, 10), gather(20, 30), gather(32, 40, unit="b"), gather(41, 45, category=PUSH), gather(50, 60, 1)],
        1: [gather(20, 31), gather(5, 10), gather(33, 41, unit="b"), gather(41, 45, category=PUSH), gather(58, 60, 1)],
    }
    split = split_waits(first)
    waits = {
        rank: [span[2:4] for span in spans if span.category == WAIT] for rank, spans in split.spans_by_rank.items()
    }
    assert waits == {0: [(0, 5), (32, 33), (50, 58)], 1: []}


def test_a_span_that_ends_before_the_last_arrival_is_all_wait_and_keeps_its_bytes():
    split = split_waits({0: [gather(0, 10, category=PUSH)], 1: [gather(12, 20, category=PUSH)]})
    assert split.spans_by_rank[0] == [
        Span(WAIT, "main", 0, 10, 0, 0, "a", 1, 0),
        gather(10, 10, category=PUSH),
    ]


def test_of_ranks_that_arrive_last_together_the_lowest_is_named():
    split = split_waits({0: [gather(0, 10)], 2: [gather(5, 10)], 1: [gather(5, 10)]})
    assert split.spans_by_rank[0][0].peer == 1


def test_an_epoch_whose_counts_differ_is_left_alone_and_flagged():
    spans = {
        0: [gather(0, 10), gather(10, 20), gather(30, 40, 1)],
        1: [gather(5, 10), gather(35, 40, 1)],
    }
    split = split_waits(spans)
    assert split.unsplit == (0,)
    assert split.spans_by_rank[0][:2] == spans[0][:2]
    assert split.spans_by_rank[1][0] == spans[1][0]
    assert [span.category for span in split.spans_by_rank[0][2:]] == [WAIT, FETCH]


def test_other_spans_pass_through():
    spans = {
        0: [
            Span(FETCH, "main", 0, 9, 0, 0, "a", 1),
            gather(0, 9)._replace(lane="fetch"),
            Span(WINDOW, "main", 0, 9, 0),
        ],
        1: [],
    }
    assert split_waits(spans) == (spans, ())
    assert split_waits({}) == ({}, ())


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), min_size=2, max_size=2),
        min_size=1,
        max_size=8,
    )
)
def test_splitting_moves_no_time_and_no_bytes(calls):
    """Ranks compute, then call; the time of waits and transfers together, the bytes and the bubble stay."""
    spans, at = {0: [], 1: []}, [0, 0]
    for call in calls:
        for rank, (before, length, push) in enumerate(call):
            start = at[rank] + before
            category = PUSH if push else FETCH
            spans[rank].append(gather(start, start + length, unit=str(push), category=category))
            at[rank] = start + length + 1
    for rank in spans:
        spans[rank] += [Span(MICROBATCH, "main", 0, at[rank], 0, 0), Span(WINDOW, "main", 0, at[rank], 0)]
    split = split_waits(spans)
    for rank in spans:
        assert sum(s.nbytes for s in split.spans_by_rank[rank]) == sum(s.nbytes for s in spans[rank])
    (before,), (after,) = breakdown(spans).steps, breakdown(split.spans_by_rank).steps
    assert after.bubble == before.bubble
    for rank in spans:
        parts = [
            sum(row[rank][name] for name in (FETCH, PUSH, WAIT)) for row in (before.nanoseconds, after.nanoseconds)
        ]
        assert parts[0] == parts[1]
    if split.unsplit:
        assert split.spans_by_rank == spans
