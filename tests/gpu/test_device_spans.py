"""Spans of the training thread on CUDA are times of the device's compute stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.device import own_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from odc.experiments.collectives import record_collectives, recorded_stalls
from odc.experiments.device import device_clock
from odc.trace import (
    COLLECTIVE,
    COLLECTIVE_LANES,
    FETCH,
    MAIN,
    MICROBATCH,
    NO_PEER,
    PUSH,
    WAIT,
    Recorder,
    Span,
    recorder,
    split_waits,
)


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def timed(device: torch.device) -> Iterator[Recorder]:
    """The process's recorder."""
    recorder().time_by(device_clock(device))
    recorder().clear()
    yield recorder()
    recorder().time_by(None)
    recorder().clear()


def test_a_span_holds_the_work_that_was_queued_in_it(device: torch.device) -> None:
    recorder = Recorder()
    recorder.time_by(device_clock(device))
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    values = torch.ones(512, 512, device=device)
    for _ in range(2):  # the second time with events that were used before
        recorder.clear()
        begin = time.monotonic_ns()
        with recorder.microbatch(0):
            first.record()
            for _ in range(50):
                values = values @ values / 512
            last.record()
        with recorder.span(FETCH):
            pass
        queued, fetched = recorder.spans()
        end = time.monotonic_ns()
        assert queued.category == MICROBATCH
        work = round(first.elapsed_time(last) * 1e6)
        assert queued.end_ns - queued.start_ns >= 0.99 * work, "its events lie around the work's"
        assert begin <= queued.start_ns <= queued.end_ns <= fetched.start_ns <= fetched.end_ns <= end


def test_a_stall_holds_the_work_that_is_waited_for(device: torch.device, timed: Recorder) -> None:
    side, compute = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    values, own = torch.ones(512, 512, device=device), torch.ones(4, device=device)
    compute.synchronize()
    with recorded_stalls(compute), timed.microbatch(0):
        own += 1
        with torch.cuda.stream(side):
            start = torch.cuda.Event(enable_timing=True)
            start.record(compute)
            side.wait_event(start)  # not the compute stream's: no span
            first.record(side)
            for _ in range(50):
                values = values @ values / 512
            last.record(side)
        compute.wait_event(last)
        own += 1
    whole = [span for span in timed.spans() if span.category == MICROBATCH]
    (stall,) = [span for span in timed.spans() if span.category == WAIT]
    work = round(first.elapsed_time(last) * 1e6)
    assert stall.peer == COLLECTIVE
    assert whole[0].end_ns - whole[0].start_ns >= 0.99 * work
    assert whole[0].start_ns <= stall.start_ns and stall.end_ns <= whole[0].end_ns
    # The host queues the work while the device does it: what is left when the host comes to the wait is the stall's.
    assert stall.end_ns - whole[0].start_ns >= 0.99 * work


def test_a_stall_is_waiting_until_the_last_rank_arrives(device: torch.device) -> None:
    """Two ranks of this process, whose gathers begin with each other on the device; the second comes late."""
    clock = device_clock(device)
    recorders = Recorder(0), Recorder(1)
    streams = [torch.cuda.Stream(device) for _ in recorders]
    arrived = [torch.cuda.Event() for _ in recorders]
    values, begins = torch.ones(512, 512, device=device), []
    torch.cuda.synchronize(device)
    with torch.cuda.stream(streams[1]):
        for _ in range(50):
            values = values @ values / 512
    for one, stream, event in zip(recorders, streams, arrived, strict=True):
        one.time_by(clock)
        begins.append(one.now_in(stream))
        event.record(stream)
    for one, stream, begin in zip(recorders, streams, begins, strict=True):
        for event in arrived:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            own = torch.ones(512, 512, device=device)  # what another stream frees may be given out again there
            for _ in range(3):
                own = own @ own / 512
        end, lane = one.now_in(stream), COLLECTIVE_LANES[FETCH]
        one.add(FETCH, begin, end_ns=end, unit="unit", peer=COLLECTIVE, lane=lane)
    start = recorders[0].now()
    torch.cuda.current_stream(device).wait_stream(streams[0])
    recorders[0].add(WAIT, start, unit=COLLECTIVE_LANES[FETCH], peer=COLLECTIVE)
    spans = {one.rank: one.spans() for one in recorders}
    (_, stall), (late,) = spans[0], spans[1]
    split = split_waits(spans)
    assert not split.unsplit
    pieces = [span for span in split.spans_by_rank[0] if span.lane == MAIN]
    assert (pieces[-1].category, pieces[-1].peer) == (FETCH, COLLECTIVE)
    assert pieces[0].start_ns == stall.start_ns and pieces[-1].end_ns == stall.end_ns
    if stall.start_ns < late.start_ns:  # unless the device is so fast that all is over
        waiting = [span for span in pieces if span.category == WAIT]
        assert waiting[-1].end_ns == late.start_ns and {span.peer for span in waiting} == {1}


UNITS = 3


def stalls(rank: int, world: int) -> list[Span]:
    """What is recorded of two microbatches under FSDP2."""
    device = own_device(rank)
    model: Any = nn.Sequential(*(nn.Linear(32, 32) for _ in range(UNITS))).to(device)
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cuda", (world,)))
    record_collectives(model)
    recorder().time_by(device_clock(device))
    recorder().clear()
    with recorded_stalls(torch.cuda.current_stream(device)), recorder().window(1):
        for index in range(2):
            with recorder().microbatch(index):
                model(torch.ones(4, 32, device=device)).sum().backward()
    spans = recorder().spans()
    recorder().time_by(None)
    recorder().clear()
    return spans


def test_fsdp2s_compute_stream_waits_for_every_gather_and_every_reduction(ranks) -> None:
    found = dict(enumerate(ranks(2).run(stalls, timeout=120)))
    for spans in found.values():
        for whole in [span for span in spans if span.category == MICROBATCH]:
            of_it = [span for span in spans if span.microbatch == whole.microbatch]
            waits = [span for span in of_it if span.category == WAIT]
            ends = [whole.start_ns, *(at for span in waits for at in (span.start_ns, span.end_ns)), whole.end_ns]
            assert ends == sorted(ends)
            for category, lane in COLLECTIVE_LANES.items():
                assert len([span for span in waits if span.unit == lane]) >= UNITS, lane
                calls = [span for span in of_it if span.lane == lane]
                # Backward gathers again what was resharded after forward.
                assert len(calls) in ({UNITS} if category == PUSH else range(UNITS, 2 * UNITS + 1))
                assert all(span.end_ns >= span.start_ns and span.peer == COLLECTIVE for span in calls)
    split = split_waits(found)
    assert not split.unsplit
    for rank, spans in split.spans_by_rank.items():
        lost, before = (
            sum(span.end_ns - span.start_ns for span in some if span.lane == MAIN and span.peer != NO_PEER)
            for some in (spans, found[rank])
        )
        assert lost == before, "no time is lost or made"
        assert not any(s.category == WAIT and s.peer == COLLECTIVE and s.unit for s in spans), (
            "of a lane, and not split"
        )
