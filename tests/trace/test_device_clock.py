"""A device's clock over a stand-in device, which does its work when it is asked to, and has its own clock."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from odc.trace import COLLECTIVE_LANES, COMPUTE, FETCH, MICROBATCH, OPTIMIZER, DeviceClock, Recorder, breakdown

MS = 1_000_000
STREAM = "the compute stream"


@dataclass
class Device:
    """`behind_ns`: how far the work queued now will end after the host's time, and `elsewhere_ns` that of other
    streams; its clock starts at `zero` and runs `rate` times as fast as the host's.
    """

    rate: float = 1.0
    zero: float = 5e9
    behind_ns: int = 0
    elsewhere_ns: int = 0
    events: list[Event] = field(default_factory=list)
    waits: int = 0
    host_ns: int = 10**12

    def event(self) -> Event:
        self.events.append(Event(self))
        return self.events[-1]

    def clock(self) -> int:
        self.host_ns += 1000
        return self.host_ns


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.reached, self.settled = device, 0.0, True

    def record(self, stream: object) -> None:
        self.settled = stream == STREAM  # `synchronize` of a later event covers all of that stream
        behind_ns = self.device.behind_ns if stream == STREAM else self.device.elsewhere_ns
        host_ns = self.device.host_ns + behind_ns
        self.reached = self.device.zero + host_ns * self.device.rate

    def synchronize(self) -> None:
        self.settled = True
        self.device.waits += 1
        self.device.host_ns += self.device.behind_ns
        self.device.behind_ns = 0

    def elapsed_time(self, end: Any) -> float:
        assert end.settled, "CUDA refuses to time an event that the device has not come to"
        return float(end.reached - self.reached) / MS


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr("odc.trace.device_clock.time.monotonic_ns", made.clock)
    return made


def timed(device: Device, most: int = 100) -> Recorder:
    recorder = Recorder()
    recorder.time_by(DeviceClock(device.event, STREAM, most))
    return recorder


def near(expected: int) -> object:
    return pytest.approx(expected, abs=0.01 * MS)


@pytest.mark.parametrize("rate", [1.0, 1.0001, 0.97])
def test_a_span_lasts_as_long_as_the_device_took(device: Device, rate: float) -> None:
    device.rate = rate
    recorder = timed(device)
    device.host_ns += 40 * MS
    start = device.host_ns
    with recorder.window(1):
        with recorder.microbatch(0):
            device.host_ns += MS  # to queue the work
            device.behind_ns = 30 * MS
        with recorder.span(OPTIMIZER):
            device.behind_ns += 5 * MS
    spans = {span.category: span for span in recorder.spans()}
    assert spans[MICROBATCH].start_ns == near(start)
    assert spans[MICROBATCH].end_ns == near(start + 31 * MS)
    assert spans[OPTIMIZER].start_ns == near(start + 31 * MS), "queued while the microbatch still ran"
    assert spans[OPTIMIZER].end_ns == near(start + 36 * MS)
    assert {span.category: span for span in recorder.spans()} == spans, "asked twice, the same"


def test_waiting_that_hides_behind_compute_takes_no_time(device: Device) -> None:
    recorder = timed(device)
    with recorder.window(1), recorder.microbatch(0):
        device.behind_ns = 20 * MS
        with recorder.span(FETCH, unit="hidden"):
            device.host_ns += 8 * MS  # the host waits, the device computes on
            device.behind_ns -= 8 * MS
        with recorder.span(FETCH, unit="exposed"):
            device.host_ns += 30 * MS
            device.behind_ns = 0
        device.behind_ns = 10 * MS
    hidden, exposed = [span for span in recorder.spans() if span.category == FETCH]
    assert hidden.end_ns - hidden.start_ns == near(0)
    assert exposed.end_ns - exposed.start_ns == near(18 * MS)
    (step,) = breakdown({0: recorder.spans()}).steps
    assert step.nanoseconds[0][FETCH] == near(18 * MS)
    assert step.nanoseconds[0][COMPUTE] == near(30 * MS)


def test_nothing_waits_within_a_step_and_events_are_used_again(device: Device) -> None:
    recorder = timed(device)
    made = []
    for number in range(3):
        waits = device.waits
        with recorder.window(number):
            for index in range(4):
                with recorder.microbatch(index), recorder.span(FETCH):
                    pass
        assert device.waits == waits
        recorder.spans()
        assert device.waits > waits
        recorder.clear()
        made.append(len(device.events))
    assert made[0] == made[1] == made[2]
    assert not recorder.spans()


def test_other_lanes_keep_the_hosts_times(device: Device) -> None:
    recorder = timed(device)
    made = len(device.events)
    device.behind_ns = 50 * MS
    start = recorder.now_on("fetch")
    recorder.add(FETCH, start, lane="fetch")
    recorder.add(FETCH, recorder.now_on("push"), lane="push")
    recorder.add(FETCH, 7, end_ns=9)  # of moments that did not come from `now`
    fetched, pushed, given = recorder.spans()
    assert (fetched.start_ns, given.start_ns, given.end_ns) == (start, 7, 9)
    assert fetched.end_ns - start < MS
    assert pushed.end_ns - pushed.start_ns < MS
    assert len(device.events) <= made + 1, "they record no event; the one more is the reference's"
    recorder.add(FETCH, noted := recorder.now(), lane="fetch")
    assert recorder.spans()[-1].start_ns == noted


def test_events_are_bounded_and_the_oldest_spans_stay_the_hosts(device: Device) -> None:
    recorder = timed(device, most=4)
    made = len(device.events)
    for _ in range(3):
        with recorder.span(FETCH):
            device.behind_ns += 10 * MS
    first, second, third = [span.end_ns - span.start_ns for span in recorder.spans()]
    assert first < MS
    assert second == third == near(10 * MS)
    assert len(device.events) <= made + 5


def test_a_device_is_never_ahead_of_its_host(device: Device) -> None:
    """Where the reference is off by part of a round trip."""
    recorder = timed(device)
    device.zero -= 3 * MS
    moment = recorder.now()
    device.zero += 3 * MS
    recorder.add(FETCH, moment)
    (span,) = recorder.spans()
    assert moment == span.start_ns <= span.end_ns


def test_backward_on_a_thread_of_its_own_is_timed_too(device: Device) -> None:
    recorder = timed(device)

    def backward() -> None:
        with recorder.span(FETCH):
            device.behind_ns += 10 * MS

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    (span,) = recorder.spans()
    assert span.end_ns - span.start_ns == near(10 * MS)


def test_without_a_device_the_host_is_asked_directly(device: Device) -> None:
    recorder = timed(device)
    recorder.time_by(None)
    made = len(device.events)
    with recorder.span(FETCH):
        pass
    assert recorder.now is Recorder().now
    assert len(device.events) == made


def test_a_collectives_lane_has_the_times_of_its_own_stream(device: Device) -> None:
    recorder = timed(device)
    device.behind_ns, device.elsewhere_ns, start = 30 * MS, 7 * MS, device.host_ns
    begin = recorder.now_in("a stream")
    device.elsewhere_ns = 9 * MS
    recorder.add(FETCH, begin, end_ns=recorder.now_in("a stream"), lane=COLLECTIVE_LANES[FETCH])
    recorder.add(FETCH, begin, end_ns=begin + 5, lane="fetch")
    found, threads = recorder.spans()
    assert found.start_ns == near(start + 7 * MS) and found.end_ns == near(start + 9 * MS)
    assert (threads.start_ns, threads.end_ns) == (begin, begin + 5)
    recorder.time_by(None)
    made = len(device.events)
    assert recorder.now_in("a stream") and len(device.events) == made
