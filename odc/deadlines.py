"""How a thread waits: a time limit that progress renews, and pauses that grow between two checks."""

from __future__ import annotations

import time


class Deadline:
    """A time limit that starts anew whenever the awaited peer makes progress: whenever the value `progress` changes."""

    def __init__(self, timeout_s: float, progress: object = None) -> None:
        self.timeout_s = timeout_s
        self._begin, self._progress = time.monotonic(), progress

    def passed(self, progress: object = None) -> bool:
        """Whether `timeout_s` have gone by since the construction, or since the last call that brought a new value."""
        now = time.monotonic()
        if progress != self._progress:
            self._begin, self._progress = now, progress
        return now - self._begin >= self.timeout_s

    def remaining(self) -> float:
        """Seconds that are left, 0 or less once it has passed."""
        return self._begin + self.timeout_s - time.monotonic()


class Backoff:
    """Pauses between two looks: `yields` times the thread only yields, then each sleep is `growth` times the last."""

    def __init__(self, first_s: float, longest_s: float, *, growth: float = 1.5, yields: int = 0) -> None:
        self._first_s, self._longest_s, self._growth = first_s, longest_s, growth
        self._next_s, self._yields = first_s, yields
        self.yielding = yields > 0  # whether the last pause was not a sleep

    def sleep(self) -> None:
        if self._yields > 0:
            self._yields -= 1
            time.sleep(0)
            return
        self.yielding = False
        time.sleep(self.advance())

    def advance(self) -> float:
        """Seconds of the next sleep, for a caller that has another way to sleep."""
        pause, self._next_s = self._next_s, min(self._next_s * self._growth, self._longest_s)
        return pause

    def restart(self) -> None:
        self._next_s = self._first_s
