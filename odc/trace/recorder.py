"""The recorder: one ring of spans for each process, cheap enough to stay on.

The ring is a bounded deque of plain tuples: `deque.append` is atomic under the interpreter lock and drops the oldest
span by itself, and one `add` costs well under a microsecond. A span takes about 200 bytes, 40 MB when the ring is full.

A span's epoch and microbatch are the recorder's at the time when the span *ends*; on background lanes this is where the
training thread is by then.

Times are the host's; with `time_by`, those of the main lane are a device's once `spans` is asked for them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Final

from odc.trace.device_clock import DeviceClock
from odc.trace.spans import MAIN, MARKS, MICROBATCH, NO_PEER, WINDOW, Span, gone_back

_clock: Final = time.monotonic_ns

CAPACITY: Final = 200_000


class Recorder:
    """Collects the newest `capacity` spans of one process. Adding one never synchronizes, nor raises for being full.

    Only the training thread may call `window` and `microbatch`, because they mark where it is; any thread may call the
    others. Without `enabled`, `add` returns at once; the marks still keep `epoch` and `microbatch_index` up to date.

    Attributes:
        rank: global rank of the process.
        newest: number of the last minibatch that has ended; -1 before the first.
        before: minibatches that were done before the sharded roots of this process were built; 0 without recoveries.
    """

    def __init__(self, rank: int = 0, *, enabled: bool = True, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"a recorder's capacity must be at least one span, not {capacity!r}")
        self.rank, self.enabled = rank, enabled
        self.epoch = self.microbatch_index = self.newest = -1
        self.before = 0
        self._spans: deque[tuple[str, str, int, int, int, int, str, int, int]] = deque(maxlen=capacity)
        # Counts appended spans and its own reads: `next` is atomic under the interpreter lock, `+= 1` is not.
        self._appended = count().__next__
        self._reads = 0
        self._read_lock = threading.Lock()
        self._depth = {WINDOW: 0, MICROBATCH: 0}
        self._device_clock: DeviceClock | None = None
        self.now: Callable[[], int] = _clock  # for the main lane; an attribute, as nothing is cheaper

    @property
    def dropped(self) -> int:
        """How many spans were dropped for newer ones since the start or the last `clear`."""
        with self._read_lock:
            total = self._appended() - self._reads
            self._reads += 1
        return max(0, total - len(self._spans))

    def time_by(self, clock: DeviceClock | None) -> None:
        """Time the main lane by a device from now on, or by the host again. Call it between two steps."""
        self._device_clock = clock
        self.now = _clock if clock is None else clock.now

    def now_on(self, lane: str) -> int:
        """`now` for a thread of any lane: only the main lane is timed by a device."""
        return self.now() if lane == MAIN else _clock()

    def now_in(self, stream: object) -> int:
        """`now` for a lane of collectives: when the device of `time_by` comes here in `stream`; the host's without."""
        return _clock() if self._device_clock is None else self._device_clock.now_in(stream)

    def add(
        self,
        category: str,
        start_ns: int,
        *,
        end_ns: int | None = None,
        unit: str = "",
        peer: int = NO_PEER,
        nbytes: int = 0,
        lane: str = MAIN,
    ) -> None:
        """Append one span that began at `start_ns` (from `now()` or `now_on(lane)`) and ends at `end_ns`, or now."""
        if not self.enabled:
            return
        if end_ns is None:
            end_ns = self.now() if lane == MAIN else _clock()
        # One append of one tuple: no other thread can see a partial span. Counted afterwards: a span that is counted
        # and not there yet would pass for one that was dropped. `clear` begins another count.
        counted = self._appended
        self._spans.append((category, lane, start_ns, end_ns, self.epoch, self.microbatch_index, unit, peer, nbytes))
        counted()

    def span(self, category: str, *, unit: str = "", peer: int = NO_PEER) -> _SpanContext:
        """Record the body of a `with` as one span of the main lane, even if it raises."""
        return _SpanContext(self, category, unit, peer)

    def window(self, epoch: int) -> Mark:
        """Mark one whole minibatch, from begin to the end of finish, even if it raises; no-op inside another window.

        Sets `epoch` until the next window, so that an optimizer step after the window belongs to it.
        """
        return Mark(self, WINDOW, epoch)

    def microbatch(self, index: int, unit: str = "") -> Mark:
        """Mark one forward and backward, even if it raises; does nothing inside another microbatch.

        `microbatch_index` is `index` inside and -1 after. For a piece of a split sample, `unit` is `piece_of` it.
        """
        return Mark(self, MICROBATCH, index, unit)

    def spans(self) -> list[Span]:
        """A copy of the newest spans, in the order they ended. Waits for the device of `time_by`, if there is one.

        Where older spans were dropped, the oldest minibatch left has no WINDOW and no MICROBATCH marks here, because
        some of its spans may be missing.
        """
        # list() of a deque runs no Python code, so no other thread can append meanwhile.
        kept = [Span._make(span) for span in list(self._spans)]
        if self._device_clock is not None:
            kept = self._device_clock.translated(kept)
        if not self.dropped:
            return kept
        cut = next((span.epoch for span in kept if span.lane == MAIN), None)
        return [span for span in kept if span.epoch != cut or span.category not in MARKS]

    def go_back(self, epoch: int) -> None:
        """What came after minibatch `epoch`, the `newest` when a state was kept, is given up and will be done again.

        Only while no other thread records: between two generations of a job (docs/recovery.md).
        """
        kept = gone_back((Span._make(span) for span in self._spans), epoch)
        self._spans = deque(kept, maxlen=self._spans.maxlen)
        self.newest, self.before = epoch, max(0, epoch)

    def clear(self) -> None:
        """Forget all spans and the count of dropped ones; `epoch`, `microbatch_index` and open marks stay.

        Waits for the device of `time_by`, if there is one.
        """
        with self._read_lock:
            self._spans.clear()
            self._appended = count().__next__
            self._reads = 0
        if self._device_clock is not None:
            self._device_clock.clear()


class _SpanContext:
    """`Recorder.span`. A class, because a generator costs more than twice as much."""

    __slots__ = ("_category", "_peer", "_recorder", "_start", "_unit")

    def __init__(self, recorder: Recorder, category: str, unit: str, peer: int) -> None:
        self._recorder, self._category, self._start = recorder, category, 0
        self._unit, self._peer = unit, peer

    def __enter__(self) -> None:
        self._start = self._recorder.now()

    def __exit__(self, *_: object) -> None:
        self._recorder.add(self._category, self._start, unit=self._unit, peer=self._peer)


class Mark:
    """`Recorder.window` and `Recorder.microbatch`: the outermost mark of a kind sets the number and is recorded."""

    __slots__ = ("_kind", "_number", "_recorder", "_start", "_unit")

    def __init__(self, recorder: Recorder, kind: str, number: int, unit: str = "") -> None:
        self._recorder, self._kind, self._number, self._start, self._unit = recorder, kind, number, 0, unit

    def __enter__(self) -> None:
        recorder, kind = self._recorder, self._kind
        depth = recorder._depth[kind]
        recorder._depth[kind] = depth + 1
        if depth == 0:
            if kind == WINDOW:
                recorder.epoch = self._number
            else:
                recorder.microbatch_index = self._number
        if depth == 0 or kind == WINDOW:  # a window that outlasts the one around it is recorded from its own start on
            self._start = recorder.now()

    def __exit__(self, *_: object) -> None:
        self._end(record=True)

    def cancel(self) -> None:
        """End the mark without recording it, in place of `__exit__`: there was no minibatch after all."""
        self._end(record=False)

    def _end(self, *, record: bool) -> None:
        recorder = self._recorder
        recorder._depth[self._kind] -= 1
        if recorder._depth[self._kind] == 0:
            if record:
                recorder.add(self._kind, self._start, unit=self._unit)
                if self._kind == WINDOW:
                    recorder.newest = self._number
            if self._kind == MICROBATCH:
                recorder.microbatch_index = -1


_process_recorder: Recorder | None = None
_making = threading.Lock()


def recorder() -> Recorder:
    """The recorder of this process, made on first use."""
    global _process_recorder
    if _process_recorder is None:
        with _making:
            if _process_recorder is None:
                _process_recorder = Recorder()
    return _process_recorder
