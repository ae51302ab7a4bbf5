"""Is the peer ready to be read from or pushed to? The two waits that fetch and push are built on.

Chose an object of its own, which knows the heap and nothing of the verbs that use it: the verbs hold it, nothing points
back, and a root that is given up frees its memory at once instead of at some later garbage collection.
"""

from __future__ import annotations

from odc.runtime.layout import Space
from odc.runtime.staging import Outbox
from odc.runtime.wait import Waiter
from odc.runtime.words import Word


class Ready:
    """Waits for one root's peers; may be used from several threads of its rank.

    Args:
        space: the root's heaps.
        waiter: of the root.
    """

    def __init__(self, space: Space, waiter: Waiter) -> None:
        self._space, self._waiter = space, waiter
        self._own = space.board(space.geometry.me)
        self._known: tuple[int, frozenset[int]] = (0, frozenset())  # (epoch, members that have published it)

    def published(self, member: int, lane: str = "main") -> None:
        """Wait until `member` has published the own current epoch."""
        epoch = self._own.load(Word.PUBLISHED)
        known_epoch, known = self._known
        if known_epoch == epoch and member in known:
            return
        board = self._space.board(member)
        what = f"rank {self._space.geometry.ranks[member]} to publish epoch {epoch}"
        self._waiter.until(lambda: board.load(Word.PUBLISHED) >= epoch, member, what, lane=lane)
        # One assignment: a thread that overwrites another's news costs that one a second look, nothing else.
        self._known = (epoch, (known if known_epoch == epoch else frozenset()) | {member})

    def to_push(self, owner: int) -> None:
        """Wait until the owner has zeroed its accumulators for the own current epoch. On the sender's thread."""
        self.published(owner, "push")

    def credit(self, box: Outbox) -> None:
        """Wait until `box` has a free slot. On the sender's thread."""
        if box.credit() <= 0:
            rank = self._space.geometry.ranks[box.owner]
            what = f"a free staging slot of rank {rank} (its server has to add what was pushed)"
            self._waiter.until(lambda: box.credit() > 0, box.owner, what, lane="push")
