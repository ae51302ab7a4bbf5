"""The recorder: one list of spans a process, cheap enough to stay on.

Chose a plain list of plain tuples over a ring buffer, a lock or a C extension: `list.append` is atomic under the
interpreter lock, and one `add` costs well under a microsecond (bench/bench_trace.py measures it). The price is memory,
about 200 bytes a span, so a recorder stops at `capacity` and counts what it drops: the oldest spans stay, and a
minibatch that no longer fits lacks its WINDOW mark, so that a breakdown leaves it out rather than guess.

A span's epoch and microbatch are what the recorder's attributes say when the span *ends*; on background lanes that is
where the training thread is by then.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final

from odc.trace.span import MAIN, MICROBATCH, NO_PEER, WINDOW, Span

_clock: Final = time.monotonic_ns


class Recorder:
    """Collects the spans of one process. Never synchronizes and never raises for being full.

    `add`, `span`, `now` and `spans` may be called from any thread; `window` and `microbatch` only from the training
    thread, because they say where that thread is.

    Args:
        rank: global rank of this process.
        enabled: False makes `add` return at once; the marks still keep `epoch` and `microbatch_index` up to date.
        capacity: spans to keep; later ones are counted in `dropped` (threads that race for the last place may exceed
            it by one span each).
    """

    __slots__ = (
        "_depth",
        "_drop_lock",
        "_spans",
        "capacity",
        "dropped",
        "enabled",
        "epoch",
        "microbatch_index",
        "rank",
    )

    def __init__(self, rank: int = 0, *, enabled: bool = True, capacity: int = 1_000_000) -> None:
        if capacity < 1:
            raise ValueError(f"a recorder's capacity must be at least one span, not {capacity!r}")
        self.rank = rank
        self.enabled = enabled
        self.capacity = capacity
        self.dropped = 0
        self.epoch = -1
        self.microbatch_index = -1
        self._spans: list[tuple[str, str, int, int, int, int, str, int, int]] = []
        self._drop_lock = threading.Lock()
        self._depth = {WINDOW: 0, MICROBATCH: 0}

    def set_rank(self, rank: int) -> None:
        """Say which global rank this process is, once it is known."""
        self.rank = rank

    now = staticmethod(_clock)

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
        """Append one span that began at `start_ns` (from `now()`) and ends at `end_ns`, or now."""
        if not self.enabled:
            return
        if end_ns is None:
            end_ns = _clock()
        spans = self._spans
        if len(spans) < self.capacity:
            # One append of one tuple: no other thread can see half a span.
            spans.append((category, lane, start_ns, end_ns, self.epoch, self.microbatch_index, unit, peer, nbytes))
        else:
            with self._drop_lock:
                self.dropped += 1

    def span(
        self, category: str, *, unit: str = "", peer: int = NO_PEER, nbytes: int = 0, lane: str = MAIN
    ) -> _SpanContext:
        """Record the body of a `with` as one span, also when it raises."""
        return _SpanContext(self, category, unit, peer, nbytes, lane)

    def window(self, epoch: int) -> Mark:
        """Mark one whole minibatch, from begin to the end of finish, also when it raises. Sets `epoch`, which stays
        until the next window, so that an optimizer step after the window belongs to it.

        Inside another window it does nothing: the outer mark wins, so that a job may mark its own steps around a
        runtime that marks them too.
        """
        return Mark(self, WINDOW, epoch)

    def microbatch(self, index: int) -> Mark:
        """Mark one forward and backward, also when it raises; `microbatch_index` is `index` inside and -1 after.

        Inside another microbatch it does nothing.
        """
        return Mark(self, MICROBATCH, index)

    def spans(self) -> list[Span]:
        """All spans so far, in the order they ended. A copy: later spans do not appear in it."""
        return [Span._make(span) for span in self._spans.copy()]

    def clear(self) -> None:
        """Forget all spans and the count of dropped ones; `epoch`, `microbatch_index` and open marks stay."""
        self._spans.clear()
        self.dropped = 0


class _SpanContext:
    """`Recorder.span`. A class, not a generator: entering and leaving one costs less than half as much."""

    __slots__ = ("_category", "_lane", "_nbytes", "_peer", "_recorder", "_start", "_unit")

    def __init__(self, recorder: Recorder, category: str, unit: str, peer: int, nbytes: int, lane: str) -> None:
        self._recorder = recorder
        self._category = category
        self._unit = unit
        self._peer = peer
        self._nbytes = nbytes
        self._lane = lane
        self._start = 0

    def __enter__(self) -> None:
        self._start = _clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.add(
            self._category, self._start, unit=self._unit, peer=self._peer, nbytes=self._nbytes, lane=self._lane
        )


class Mark:
    """`Recorder.window` and `Recorder.microbatch`: the outermost of a kind sets the number and is recorded."""

    __slots__ = ("_kind", "_number", "_recorder", "_start")

    def __init__(self, recorder: Recorder, kind: str, number: int) -> None:
        self._recorder = recorder
        self._kind = kind
        self._number = number
        self._start = 0

    def __enter__(self) -> None:
        recorder, kind = self._recorder, self._kind
        depth = recorder._depth[kind]
        recorder._depth[kind] = depth + 1
        if depth == 0:
            if kind == WINDOW:
                recorder.epoch = self._number
            else:
                recorder.microbatch_index = self._number
            self._start = _clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(record=True)

    def cancel(self) -> None:
        """Leave it without a record, in place of `__exit__`: what it marked was no minibatch after all."""
        self._leave(record=False)

    def _leave(self, *, record: bool) -> None:
        recorder = self._recorder
        recorder._depth[self._kind] -= 1
        if recorder._depth[self._kind] == 0:
            if record:
                recorder.add(self._kind, self._start)
            if self._kind == MICROBATCH:
                recorder.microbatch_index = -1


_process_recorder: Recorder | None = None
_making = threading.Lock()


def recorder() -> Recorder:
    """The recorder of this process, made on first use; `set_rank` tells it whose it is."""
    global _process_recorder
    if _process_recorder is None:
        with _making:
            if _process_recorder is None:
                _process_recorder = Recorder()
    return _process_recorder
