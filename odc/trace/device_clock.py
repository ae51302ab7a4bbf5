"""A device's own clock: when its compute stream reached the moments that the recorder notes on the host.

The host runs ahead of its device, so host times show when work was queued. With a `DeviceClock` every moment
of the main lane also records an event on the compute stream, which costs microseconds and waits for nothing. Between
two steps `translated` puts the events' times in place of the host's. A span then lasts from when the device was done
with all compute queued before it to when it was done with all queued until its end: waiting that hides behind compute
takes no time in it, and idle time of the stream takes its full time.

Events are placed on the host's clock between two references, which are events whose host time is known to within half
a round trip; so the spans of ranks on one host can be compared, as on the CPU. Names no library: events and stream are
the caller's, for instance torch's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, Protocol

from odc.trace.spans import COLLECTIVE_LANES, MAIN, Span

_TRIES: Final = 5
_NS: Final = 1e6  # nanoseconds of a millisecond, in which devices count
_LANES: Final = frozenset((MAIN, *COLLECTIVE_LANES.values()))


class TimedEvent(Protocol):
    """What is used of `torch.cuda.Event(enable_timing=True)`."""

    def record(self, stream: Any, /) -> object: ...

    def synchronize(self) -> object: ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this event to `end`; the device is past both."""


class _Reference(NamedTuple):
    event: TimedEvent
    host_ns: int


class DeviceClock:
    """Moments of one compute stream, for `Recorder.time_by`.

    Args:
        make: a new event that can be timed. Events are used again from step to step.
        stream: the compute stream.
        most: events kept at once; of more moments than that between two steps, the oldest stay host times.

    `now` is for the main lane: the training thread, and autograd's while that one waits. The constructor, `translated`
    and `clear` wait for the device, so they belong between two steps.
    """

    def __init__(self, make: Callable[[], TimedEvent], stream: object, most: int) -> None:
        self._make, self._stream, self._most = make, stream, most
        self._free: list[TimedEvent] = []
        # Host time before the event was queued, and whether that was on another stream.
        self._noted: deque[tuple[int, TimedEvent, bool]] = deque()
        self._moments: dict[int, int] = {}  # host time -> the device's, on the host's clock
        self._before = self._reference()

    def now(self) -> int:
        """The host's time, and an event on the compute stream that records when the device gets here."""
        return self.now_in(self._stream)

    def now_in(self, stream: object) -> int:
        """`now` of another stream of the device, for the lanes of collectives."""
        moment = time.monotonic_ns()
        event = self._noted.popleft()[1] if len(self._noted) >= self._most else self._event()
        event.record(stream)
        self._noted.append((moment, event, stream is not self._stream))
        return moment

    def translated(self, spans: Iterable[Span]) -> list[Span]:
        """`spans` with device times on the main lane and on those of collectives; times that did not come from `now` or
        `now_in` stay. Waits for the device.
        """
        before, after = self._before, self._reference()
        elapsed = before.event.elapsed_time(after.event) * _NS
        rate = (after.host_ns - before.host_ns) / elapsed if elapsed > 0 else 1.0  # the clocks drift apart
        for moment, event, elsewhere in self._noted:
            if elsewhere:
                event.synchronize()
            reached = before.host_ns + round(before.event.elapsed_time(event) * _NS * rate)
            self._moments[moment] = max(moment, reached)  # a device is never ahead of its host
            self._free.append(event)
        self._noted.clear()
        self._free.append(before.event)
        self._before = after
        found = self._moments.get
        return [
            span._replace(start_ns=found(span.start_ns, span.start_ns), end_ns=found(span.end_ns, span.end_ns))
            if span.lane in _LANES
            else span
            for span in spans
        ]

    def clear(self) -> None:
        """Forget all moments; the next step is timed from here. Waits for the device."""
        self._free += [event for _, event, _ in self._noted]
        self._free.append(self._before.event)
        self._noted.clear()
        self._moments.clear()
        self._before = self._reference()

    def _event(self) -> TimedEvent:
        return self._free.pop() if self._free else self._make()

    def _reference(self) -> _Reference:
        """An event on the idle stream, and the middle of its round trip: the shortest trip of a few."""
        best: tuple[int, _Reference] | None = None
        for _ in range(_TRIES):
            event, begin = self._event(), time.monotonic_ns()
            event.record(self._stream)
            event.synchronize()
            trip = time.monotonic_ns() - begin
            if best is None or trip < best[0]:
                if best is not None:
                    self._free.append(best[1].event)
                best = trip, _Reference(event, begin + trip // 2)
            else:
                self._free.append(event)
        assert best is not None
        return best[1]
