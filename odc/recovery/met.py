"""Whether all ranks have met in a minibatch since a state was kept.

No rank ends a minibatch before every rank has begun it. Without one a rank may do any number of steps while another
does its first, and if it kept them, no step would be left that both have.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from odc.errors import UnsupportedError
from odc.fsdp import sharded_tops
from odc.fsdp.minibatch import before_done


class MinibatchMet:
    """On the main thread, until `close`. Every rank runs the minibatches of a job's models, so all have the same."""

    def __init__(self) -> None:
        self._ran, self._needed = False, True
        before_done.append(self._note)

    def _note(self) -> None:
        self._ran = True

    def watch(self, models: Iterable[nn.Module], *, buddies: bool) -> None:
        """Where odc has sharded none of `models`, their program lets ranks meet, and no minibatch is asked for.

        UnsupportedError with `buddies`: a minibatch's end is where a rank waits until its state has been read.
        """
        self._needed = any(sharded_tops(model) for model in models)
        if buddies and not self._needed:
            raise UnsupportedError("keep='buddy' is for models of fully_shard: their minibatches give it time to read")

    @property
    def since_kept(self) -> bool:
        """Whether this rank has run a minibatch since `kept`."""
        return self._ran or not self._needed

    def kept(self) -> None:
        """A state was kept, or put back."""
        self._ran = False

    def close(self) -> None:
        """Idempotent."""
        if self._note in before_done:
            before_done.remove(self._note)
