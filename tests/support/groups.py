"""Makes the shared-memory heaps of a group of ranks, each in its own process, connected through real listeners."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from odc.errors import WaitTimeoutError
from odc.memory import Attachment, ShmHeap, SymmetricHeap
from odc.net.requests import ask
from support.listeners import served


def address(identity: str, rank: int) -> str:
    return f"odc-test.{identity}.{rank}"


@contextmanager
def shm_group(
    identity: str, ranks: tuple[int, ...], me: int, deadline_s: float, outer: Sequence[SymmetricHeap] = ()
) -> Iterator[ShmHeap]:
    """The member's unsealed heap; peers can attach to it from `seal` until the end of the block.

    They cannot before the `outer` heaps, of which it is a part, are sealed too.
    """

    def connect(member: int) -> Attachment:
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            try:
                answer = ask(address(identity, ranks[member]), {}, deadline_s)
            except ConnectionError:  # not open yet
                time.sleep(0.01)
                continue
            if answer.fds:
                return Attachment(answer.fds[0], answer.reply["nbytes"], answer.reply["digest"])
            time.sleep(0.01)
        raise WaitTimeoutError(f"rank {ranks[me]}: rank {ranks[member]} did not seal its heap in {deadline_s:g} s")

    heap = ShmHeap(identity, ranks, me, connect, deadline_s)

    def sealed() -> bool:
        return all(one.sealed for one in (heap, *outer))

    def answer(_request: object, _peer: object) -> tuple[dict[str, object], tuple[int, ...]]:
        return ({"nbytes": heap.nbytes, "digest": heap.digest}, (heap.fd,)) if sealed() else ({}, ())

    with served(address(identity, ranks[me]), answer):
        yield heap
    heap.close()
