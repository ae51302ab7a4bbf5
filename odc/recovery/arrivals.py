"""What the processes of a generation show at a point, as they come: each waits for all, in few calls of the store.

The store serves all ranks of the job from one thread. Where each asked for each other's key again and again, it would
be asked ranks² times in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from odc.deadlines import STORE_LONGEST_POLL_S, STORE_POLL_S, Backoff, Deadline
from odc.net import JobStore

T = TypeVar("T")


class Arrivals(Generic[T]):
    """Those that have come are in `found`, by number, as `decode` makes them of the number and the text of its key.

    The key is `prefix` and the number; it stays. The deadline begins anew whenever one has come.
    """

    def __init__(self, store: JobStore, prefix: str, decode: Callable[[int, bytes], T], timeout_s: float) -> None:
        self.found: dict[int, T] = {}
        self._store, self._prefix, self._decode = store, prefix, decode
        self._deadline = Deadline(timeout_s, 0)
        self._backoff = Backoff(STORE_POLL_S, STORE_LONGEST_POLL_S, growth=1.2)

    def look(self, numbers: Iterable[int], *, each: bool = False) -> None:
        """Find those of `numbers` that have come: in few calls up to the first that has not, or by a call for each."""
        missing = [number for number in numbers if number not in self.found]
        keys = [f"{self._prefix}{number}" for number in missing]
        texts = map(self._store.find, keys) if each else self._store.find_leading(keys)
        for number, text in zip(missing, texts, strict=False):
            if text is not None:
                self.found[number] = self._decode(number, text)

    def late(self, numbers: Iterable[int]) -> bool:
        """Sleep a while; whether the deadline has passed. Then all of `numbers` that have come are found."""
        if self._deadline.passed(len(self.found)):
            self.look(numbers, each=True)
            return self._deadline.passed(len(self.found))
        self._backoff.sleep()
        return False
