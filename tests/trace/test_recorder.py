from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.errors import TraceError
from odc.trace import FETCH, MICROBATCH, OPTIMIZER, PUSH, WAIT, WINDOW, Recorder, Span, breakdown, recorder


def test_add_keeps_every_field():
    mine = Recorder(rank=3)
    mine.epoch, mine.microbatch_index = 7, 2
    mine.add(PUSH, 10, end_ns=25, unit="layers.1", peer=4, nbytes=99, lane="push")
    assert mine.spans() == [Span(PUSH, "push", 10, 25, 7, 2, "layers.1", 4, 99)]
    assert mine.rank == 3


def test_a_span_ends_now_on_the_clock_of_all_processes():
    mine = Recorder()
    before = time.monotonic_ns()
    mine.add(FETCH, mine.now())
    (span,) = mine.spans()
    assert before <= span.start_ns <= span.end_ns <= time.monotonic_ns()
    assert span[4:] == (-1, -1, "", -1, 0)
    assert span.lane == "main"


def test_marks_number_the_spans_inside_and_the_optimizer_after():
    mine = Recorder()
    with mine.window(5):
        with mine.microbatch(0):
            mine.add(FETCH, mine.now())
        with mine.microbatch(1), mine.span(WAIT, peer=2):
            assert mine.microbatch_index == 1
        mine.add(WAIT, mine.now())
    with mine.span(OPTIMIZER):
        pass
    assert [(span.category, span.epoch, span.microbatch) for span in mine.spans()] == [
        (FETCH, 5, 0),
        (MICROBATCH, 5, 0),
        (WAIT, 5, 1),
        (MICROBATCH, 5, 1),
        (WAIT, 5, -1),
        (WINDOW, 5, -1),
        (OPTIMIZER, 5, -1),
    ]


def test_marks_inside_marks_do_nothing():
    mine = Recorder()
    with mine.window(1), mine.microbatch(4):
        with mine.window(8), mine.microbatch(9):
            assert (mine.epoch, mine.microbatch_index) == (1, 4)
        assert (mine.epoch, mine.microbatch_index) == (1, 4)
    assert [(span.category, span.epoch, span.microbatch) for span in mine.spans()] == [
        (MICROBATCH, 1, 4),
        (WINDOW, 1, -1),
    ]
    with mine.window(2):
        assert mine.epoch == 2


def test_of_windows_that_overlap_the_one_that_ends_last_is_recorded_from_its_own_start():
    """A forward before a step, such as the check of `odc.split`, has opened the minibatch that the step ends."""
    mine = Recorder()
    earlier, step = mine.window(1), mine.window(1)
    earlier.__enter__()
    began = mine.now()
    step.__enter__()
    earlier.__exit__(None, None, None)
    step.__exit__(None, None, None)
    (window,) = mine.spans()
    assert window.category == WINDOW and began <= window.start_ns <= window.end_ns


def test_a_cancelled_mark_leaves_no_span():
    mine = Recorder()
    for mark in (mine.window(3), mine.microbatch(1)):
        mark.__enter__()
        mark.cancel()
    assert mine.spans() == []
    assert mine.microbatch_index == -1
    with mine.window(4):
        pass
    assert [span.epoch for span in mine.spans()] == [4]


def test_what_raises_is_recorded_and_raised():
    mine = Recorder()
    with pytest.raises(KeyError), mine.window(1), mine.microbatch(0), mine.span(FETCH, unit="a"):
        raise KeyError("a")
    assert [span.category for span in mine.spans()] == [FETCH, MICROBATCH, WINDOW]
    assert mine.microbatch_index == -1


def test_disabled_records_nothing_but_still_knows_where_it_is():
    mine = Recorder(enabled=False)
    with mine.window(6), mine.microbatch(2), mine.span(FETCH):
        mine.add(FETCH, mine.now())
        assert (mine.epoch, mine.microbatch_index) == (6, 2)
    assert mine.spans() == []
    assert mine.dropped == 0


@given(capacity=st.integers(1, 20), count=st.integers(0, 40))
def test_keeps_the_newest_spans_and_counts_the_rest(capacity, count):
    mine = Recorder(capacity=capacity)
    for index in range(count):
        mine.add(FETCH, index)
        assert mine.dropped == max(0, index + 1 - capacity)
    assert [span.start_ns for span in mine.spans()] == list(range(max(0, count - capacity), count))
    assert mine.dropped == mine.dropped == max(0, count - capacity)
    mine.clear()
    assert mine.spans() == []
    assert mine.dropped == 0


@given(capacity=st.integers(1, 30), background=st.integers(0, 3))
def test_a_minibatch_that_lost_spans_is_left_out_of_a_breakdown(capacity, background):
    size, epochs = 6 + background, 5
    whole, ring = Recorder(), Recorder(capacity=capacity)
    for mine in (whole, ring):
        for epoch in range(epochs):
            with mine.window(epoch):
                for _ in range(background):
                    mine.add(PUSH, mine.now(), lane="server")
                with mine.microbatch(0):
                    for _ in range(3):
                        mine.add(FETCH, mine.now())
            with mine.span(OPTIMIZER):
                pass
    # A minibatch whose first span is the oldest one looks like a minibatch that lost its first.
    left = (capacity - 1) // size if ring.dropped else epochs
    kept = ring.spans()
    marked = [span.epoch for span in kept if span.category == WINDOW]
    assert marked == list(range(epochs - left, epochs))
    assert [span.category for span in kept if span.epoch in marked] == [
        span.category for span in whole.spans() if span.epoch in marked
    ]
    if marked:
        assert [step.epoch for step in breakdown({0: kept}).steps] == marked
    else:
        with pytest.raises(TraceError, match="nothing is left to break down"):
            breakdown({0: kept})


def test_capacity_must_be_positive():
    with pytest.raises(ValueError, match="at least one span"):
        Recorder(capacity=0)


def test_threads_lose_nothing():
    mine = Recorder(capacity=6000)

    def work(number):
        for index in range(1000):
            mine.add(PUSH, index, peer=number, lane=f"lane {number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = mine.spans()
    assert len(kept) == 6000
    assert len(kept) + mine.dropped == 8000
    for number in range(8):
        starts = [span.start_ns for span in kept if span.peer == number]
        assert starts == sorted(starts)
        assert {span.lane for span in kept if span.peer == number} <= {f"lane {number}"}


def test_spans_is_a_copy():
    mine = Recorder()
    before = mine.spans()
    mine.add(FETCH, 0)
    assert before == []


def test_one_recorder_a_process():
    found = []
    threads = [threading.Thread(target=lambda: found.append(recorder())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each is recorder() for each in found)


def test_a_span_is_there_before_it_is_counted() -> None:
    """Else a read in between would take it for one that was dropped."""
    recorder = Recorder(capacity=2)
    there: list[int] = []
    recorder._appended = lambda: there.append(len(recorder._spans)) or 0  # type: ignore[func-returns-value]
    recorder.add("fetch", 0, end_ns=1)
    assert there == [1]
