"""The one table of lost ranks of a process: whatever notices the end of a rank reports it here.

    the end of a process of this host, a link, the ring of hosts, an error that ends this rank
        report -> every root, on the loop's thread: ABORT on each board that it reaches -> every wait of its ranks

The first certain report of a rank stays, for roots that are built later, and goes around the ring. A root takes the
first that concerns it, so that its own link, which knows the epoch, comes before the ring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from odc.errors import aborted_by
from odc.net.reactor import Reactor


@dataclass(frozen=True)
class Loss:
    """Rank `rank` (global) has ended, for `reason`, and rank `culprit` is to blame.

    Where there is a `detail`, even an empty one, a root states the epoch of the rank between the two. Unless it is
    `certain`, a root that is built later may reach the rank again: the end of a link may be that of a network.
    """

    rank: int
    culprit: int
    reason: str
    detail: str | None = None
    certain: bool = True

    def text(self, epoch: str = "") -> str:
        """The reason as one text."""
        return self.reason if self.detail is None else self.reason + epoch + self.detail


class Liveness:
    """The ranks of the job that are known to be lost, and those that follow: the roots and the ring. Of rank `rank`."""

    def __init__(self, reactor: Reactor, rank: int) -> None:
        self._reactor, self.rank = reactor, rank
        self._lost: dict[int, Loss] = {}  # changed on the loop's thread only
        self._followers: dict[str, Callable[[Loss], None]] = {}  # used on the loop's thread only

    def report(self, loss: Loss) -> None:
        """Record a loss that is certain, and pass it to all followers. On any thread; does not wait."""
        self._reactor.call(functools.partial(self._spread, loss))

    def _spread(self, loss: Loss) -> None:
        if loss.certain:
            self._lost.setdefault(loss.rank, loss)
        for follow in list(self._followers.values()):
            follow(loss)

    def follow(self, name: str, call: Callable[[Loss], None]) -> None:
        """Call `call` on the loop's thread for every loss, recorded ones too, until `unfollow`. On any thread."""

        def begin() -> None:
            self._followers[name] = call
            for loss in self.losses():
                call(loss)

        self._reactor.call(begin)

    def later(self, task: Callable[[], None], after_s: float) -> None:
        """Run `task` on the loop's thread after so many seconds, unless the loop ends before."""
        self._reactor.call(task, after_s=after_s)

    def refuse(self, doing: str) -> None:
        """Raise PeerLostError if another rank is lost for certain; `doing` begins its message. On any thread; does not
        wait.

        For what has no root yet, whose ABORT would end its waits. An error of this rank may be that of one thread.
        """
        for loss in self.losses():
            if loss.rank != self.rank:
                raise aborted_by(doing, loss.culprit, loss.text())

    def unfollow(self, name: str) -> None:
        """On the loop's thread."""
        self._followers.pop(name, None)

    def losses(self) -> list[Loss]:
        """The first certain report of each lost rank. On any thread: it is copied in one step."""
        return list(self._lost.values())

    def is_first(self, loss: Loss) -> bool:
        """Whether this report is the one that stays. On the loop's thread."""
        return self._lost.get(loss.rank) is loss
