"""The ranks of one evaluation, and the values that they exchange."""

from __future__ import annotations

from typing import Any

from odc.errors import ResultsError
from odc.eval import plain
from odc.net import Mailbox


class Peers(Mailbox):
    """The members of a session, as one of them sees the others. Use it from one thread.

    "Members" are indices into the session's `ranks`; member 0 coordinates, and `me` is this rank. Errors name global
    ranks.
    """

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' global ranks."""
        return self.ids

    @property
    def rank(self) -> int:
        """This global rank."""
        return self.ids[self.me]

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Every member's `value`, by member, called by every member. For small plain values (see `gather_results`)."""
        own = plain.dumps([value], f"rank {self.rank}: {what}")
        if self.me:
            self.send(0, own, what)
            return self._each(plain.loads(self.receive(0, what), what), what)
        messages = [own, *(self.receive(member, what) for member in range(1, self.world))]
        # This rank's is decoded as well, so that its value equals those of the other ranks.
        everyone = self._each([one for message in messages for one in plain.loads(message, what)], what)
        reply = plain.dumps(everyone, what)
        for member in range(1, self.world):
            self.send(member, reply, what)
        return everyone

    def _each(self, values: list[Any], what: str) -> list[Any]:
        if len(values) != self.world:
            raise ResultsError(f"rank {self.rank}: {what} cannot be read: not one value of each rank")
        return values
