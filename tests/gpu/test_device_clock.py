"""Spans of the training thread on CUDA are times of the device's compute stream."""

from __future__ import annotations

import time

import pytest
import torch

from odc.experiments.device import device_clock
from odc.trace import FETCH, MICROBATCH, Recorder


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    return torch.device("cuda", torch.cuda.current_device())


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
