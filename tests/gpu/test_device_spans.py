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

from odc.experiments.collectives import recorded_stalls
from odc.experiments.device import device_clock
from odc.trace import COLLECTIVE, FETCH, MICROBATCH, WAIT, Recorder, recorder


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


UNITS = 3


def stalls(rank: int, world: int) -> list[int]:
    """Of each of two microbatches under FSDP2, how often the compute stream waited, in order and inside it."""
    device = own_device(rank)
    model: Any = nn.Sequential(*(nn.Linear(32, 32) for _ in range(UNITS))).to(device)
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cuda", (world,)))
    recorder().time_by(device_clock(device))
    recorder().clear()
    with recorded_stalls(torch.cuda.current_stream(device)), recorder().window(1):
        for index in range(2):
            with recorder().microbatch(index):
                model(torch.ones(4, 32, device=device)).sum().backward()
    spans = recorder().spans()
    recorder().time_by(None)
    recorder().clear()
    counts = []
    for whole in [span for span in spans if span.category == MICROBATCH]:
        waits = [span for span in spans if span.category == WAIT and span.microbatch == whole.microbatch]
        ends = [whole.start_ns, *(at for span in waits for at in (span.start_ns, span.end_ns)), whole.end_ns]
        assert ends == sorted(ends)
        counts.append(len(waits))
    return counts


def test_fsdp2s_compute_stream_waits_for_every_gather_and_every_reduction(ranks) -> None:
    for first, second in ranks(2).run(stalls, timeout=120):
        assert min(first, second) >= 2 * UNITS
