"""When a read is due, so that the thread that waits for it sleeps once, and not in ever longer steps past its end."""

from __future__ import annotations

import time
from collections.abc import Callable

_SURE = 0.9  # of the expected time passes without a check: an expectation that is too long shrinks with every read
_RISE = 0.25  # of the difference to a read that took longer
_MOST_KEPT = 1 << 14  # expectations


class Pace:
    """When reads are due, by how long those of as many bytes from the same rank took lately. Used by any thread.

    What a read took counts from the end of the one before it, whose bytes came first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._took, self._ended = clock, dict[tuple[int, int], float](), 0.0

    def due(self, rank: int, nbytes: int, begun: float) -> float:
        """The time, by the clock, before which the read will hardly have ended; `begun` where nothing is known."""
        return max(begun, self._ended) + _SURE * self._took.get((rank, nbytes), 0.0)

    def ended(self, rank: int, nbytes: int, begun: float) -> None:
        """The read has been seen to be over."""
        now, expected = self._clock(), self._took.get((rank, nbytes))
        took, self._ended = now - max(begun, self._ended), now
        if expected is not None and took > expected:
            took = expected + _RISE * (took - expected)
        if expected is not None or len(self._took) < _MOST_KEPT:
            self._took[rank, nbytes] = took
