"""`model.claim(mine)`: the microbatches of one minibatch, handed out to whoever is free.

Chose an iterator that offers when it is made and claims when it is asked for the next, over a queue object with verbs
of its own: one word makes a loop over `mine` a dynamic one, and nothing has to be closed. The price is a rule that a
plain loop does not have, checked at the block's end: a rank that called `claim` goes on until the queue is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from odc.errors import OdcError, UnsupportedError
from odc.runtime import Queue, Verbs
from odc.trace import FETCH, recorder


class Claims(Iterator[dict[str, torch.Tensor]]):
    """What `OdcModule.claim` returns; made inside `with model.minibatch():`, on every rank. See there.

    Each item is a microbatch: own copies of its tensors, by name. `number` is its place in the queue (0: the costliest;
    the same whoever computes it, so it may seed dropout) and `rank` the global rank that offered it; both are -1 before
    the first.
    """

    def __init__(
        self,
        verbs: Verbs,
        explicit: bool,
        mine: Sequence[Mapping[str, torch.Tensor]],
        costs: Sequence[float] | None,
    ) -> None:
        rank = verbs.geometry.ranks[verbs.geometry.me]
        if not explicit:
            raise OdcError(f"rank {rank}: claim() outside of `with model.minibatch():`, which ends when all ranks have")
        self._verbs = verbs
        self.number = self.rank = -1
        queue_of(verbs).offer(mine, costs)

    def __next__(self) -> dict[str, torch.Tensor]:
        begin = recorder().now()
        found = self._verbs.claim()
        if found is None:
            raise StopIteration
        self.number, self.rank = found.number, self._verbs.geometry.ranks[found.member]
        recorder().add(FETCH, begin, unit="microbatch", peer=self.rank, nbytes=found.nbytes)
        return found.tensors


def queue_of(verbs: Verbs) -> Queue:
    """The root's queue; raises `UnsupportedError` where it was made without one."""
    if verbs.queue is None:
        raise UnsupportedError(
            "this model has no queue: give the root's fully_shard settings=Settings(queue_bytes=...), room for the "
            "microbatches that one rank offers in one minibatch"
        )
    return verbs.queue
