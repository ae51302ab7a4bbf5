"""The order of work that a device does later than it is asked to.

Chose four small operations (be in a lane, mark a point, follow a mark, settle) over passing streams and events through
the verbs: on the CPU, where a copy is over when it returns, all four do nothing, so one text of the protocol is right
for both. The rule they serve: no word is stored, and no lock given back, that speaks of work which has not settled.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Lanes(Protocol):
    """Of one heap; from any thread.

    Attributes:
        asynchronous: whether work may still be going on when the call that asked for it has returned.
    """

    asynchronous: bool

    def lane(self, name: str) -> AbstractContextManager[object]:
        """Inside the block this thread's device work goes to lane `name`: "fetch", "push" or "server"."""
        ...

    def mark(self) -> object:
        """A point in this thread's current lane: everything asked for so far."""
        ...

    def follow(self, mark: object) -> None:
        """Let what this thread asks for from now on wait, on the device, for a mark. Returns at once."""
        ...

    def settle(self) -> None:
        """Return once everything in this thread's current lane is done, and seen by every peer."""
        ...


class HostLanes:
    """Lanes where every copy is over when it returns."""

    asynchronous = False
    _here: AbstractContextManager[object] = nullcontext()

    def lane(self, name: str) -> AbstractContextManager[object]:
        return self._here

    def mark(self) -> None:
        return None

    def follow(self, mark: object) -> None:
        return None

    def settle(self) -> None:
        return None
