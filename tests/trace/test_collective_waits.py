from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from odc.trace import (
    COLLECTIVE,
    COLLECTIVE_LANES,
    FETCH,
    MICROBATCH,
    NO_PEER,
    PUSH,
    WAIT,
    WINDOW,
    Span,
    breakdown,
    split_waits,
)

GATHERS = COLLECTIVE_LANES[FETCH]


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


def stall(start, end, lane=GATHERS, epoch=0):
    return Span(WAIT, "main", start, end, epoch, 0, lane, COLLECTIVE)


def test_of_a_devices_stall_only_what_lies_before_the_last_arrival_is_waiting():
    """Rank 0's stream comes to the gather at 10, rank 1's at 40; the compute of rank 0 stalls for it at 25."""
    early, late = gather(10, 60)._replace(lane=GATHERS), gather(40, 61)._replace(lane=GATHERS)
    split = split_waits({0: [early, stall(25, 60)], 1: [late, stall(50, 61)]})
    waiting = early._replace(category=WAIT, end_ns=40, peer=1, nbytes=0)
    assert split.spans_by_rank == {
        0: [
            waiting,
            early._replace(start_ns=40),
            Span(WAIT, "main", 25, 40, 0, 0, GATHERS, 1),
            Span(FETCH, "main", 40, 60, 0, 0, "a", COLLECTIVE),
        ],
        1: [late, Span(FETCH, "main", 50, 61, 0, 0, "a", COLLECTIVE)],
    }


def test_a_stall_that_no_collective_explains_is_left_alone():
    """One for a stream without collectives, and those of an epoch that cannot be matched."""
    spans = {
        0: [gather(0, 9)._replace(lane=GATHERS), stall(0, 9), stall(10, 12, lane="")],
        1: [stall(3, 9)],
    }
    assert split_waits(spans) == (spans, (0,))
    spans = {0: [stall(10, 12, lane="")], 1: []}
    assert split_waits(spans) == (spans, ())


def plain(moment, lane, rank, calls):
    """What a rank that stalls for a lane does at a moment: (category, peer, unit), from all ranks' calls as
    (lane, unit, first moment and end by rank).
    """
    waiting, transfer = [], []
    for name, unit, times in calls:
        start, end = times[rank]
        if name == lane and start <= moment < end:
            last = max(times.values())[0]
            late = min(other for other, (begun, _) in times.items() if begun == last)
            waiting += [(last, -late)] if moment < last else []
            transfer.append((start, unit))
    if waiting:
        return WAIT, -max(waiting)[1], lane
    (category,) = (one for one, name in COLLECTIVE_LANES.items() if name == lane)
    return category, COLLECTIVE, max(transfer)[1] if transfer else ""


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(COLLECTIVE_LANES.values())),
            st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=3),
        ),
        max_size=7,
    ),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 25), st.sampled_from(sorted(COLLECTIVE_LANES.values())))),
)
def test_stalls_are_split_as_the_plain_reference_has_it(drawn, stalls):
    """Moment by moment, over streams of three ranks that run one collective after the other."""
    categories = {lane: category for category, lane in COLLECTIVE_LANES.items()}
    calls, at = [], {(lane, rank): 0 for lane in categories for rank in range(3)}
    for number, (lane, pauses) in enumerate(drawn):
        times = {}
        for rank, (before, length) in enumerate(pauses):
            times[rank] = (at[lane, rank] + before, at[lane, rank] + before + length)
            at[lane, rank] = times[rank][1] + 1
        calls.append((lane, f"unit {number}", times))
    spans = {
        rank: [Span(categories[lane], lane, *times[rank], 0, 0, unit, COLLECTIVE, 64) for lane, unit, times in calls]
        + [stall(begin, begin + length, lane) for begin, length, lane in stalls]
        for rank in range(3)
    }
    for rank, found in split_waits(spans).spans_by_rank.items():
        main = [span for span in found if span.lane == "main"]
        for begin, length, lane in stalls:
            pieces = []
            while not pieces or pieces[-1].end_ns < begin + length:
                pieces.append(main.pop(0))
            assert pieces[0].start_ns == begin
            assert [one.end_ns for one in pieces[:-1]] == [one.start_ns for one in pieces[1:]]
            shown = [(p.category, p.peer, p.unit) for p in pieces for _ in range(p.start_ns, p.end_ns)]
            assert shown == [plain(moment, lane, rank, calls) for moment in range(begin, begin + length)]
            kinds = [(p.category, p.peer, p.unit) for p in pieces]
            assert all(one != other for one, other in pairwise(kinds)), "two pieces of one kind"
        assert not main


def test_peers_of_others_are_no_collectives():
    spans = {0: [Span(FETCH, GATHERS, 0, 9, 0, 0, "a", NO_PEER)], 1: []}
    assert split_waits(spans) == (spans, ())
