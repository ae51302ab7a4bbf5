"""How a rank reads what lies in other members' heaps, and claims from a queue: by mapped memory, or by an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from odc.protocol.protocol import MemberProtocol
from odc.protocol.regions import DATA_REGIONS


def _nothing() -> None:
    return


@dataclass(frozen=True)
class HeapRead:
    """One read: `into` is filled with what lies from byte `offset` on in the `region` of `member`.

    `into` is uint8 [n], in the heap of a rank of this host or in CPU memory of this rank. `what` names it in errors.
    `then` is called once it has settled.
    """

    member: int
    region: str
    offset: int
    into: torch.Tensor
    what: str
    then: Callable[[], None] = _nothing

    @property
    def nbytes(self) -> int:
        return self.into.numel()


@dataclass(frozen=True)
class PassingRead:
    """One read of `nbytes` that are not kept: `use` is called with them, uint8 [nbytes] on the heap's device, 64-byte
    aligned, and has settled what it does with them when it returns. On a device they are no more than a landing holds.
    """

    member: int
    region: str
    offset: int
    nbytes: int
    what: str
    use: Callable[[torch.Tensor], None]


class HeapReader(ABC):
    """Reads of one rank, on any of its threads, after a word that is stored when the bytes are there.

    A queue is asked only after all members have offered.
    """

    @abstractmethod
    def read_all(self, reads: Iterable[HeapRead | PassingRead]) -> None:
        """Read one after the other; returns when all have settled. Two are in progress where they cross a network: the
        next one is taken from `reads`, which may take its time, and begun before the `then`, or the `use`, of the last
        one is called.
        """

    def read(self, member: int, region: str, offset: int, into: torch.Tensor, what: str) -> None:
        """Read once; returns when it has settled."""
        self.read_all([HeapRead(member, region, offset, into, what)])

    @abstractmethod
    def claim(self) -> int:
        """Add to CLAIMED at the queue's home, exactly once; returns its value before."""

    @abstractmethod
    def claims(self) -> int:
        """CLAIMED at the queue's home."""


class MappedHeaps(HeapReader):
    """Reads where every member's heap is mapped into this process. Raises as `SymmetricHeap.tensor` does."""

    def __init__(self, protocol: MemberProtocol) -> None:
        self._protocol, self._layout = protocol, protocol.layout

    def read_all(self, reads: Iterable[HeapRead | PassingRead]) -> None:
        for one in reads:
            self._read_mapped(one)

    def _read_mapped(self, one: HeapRead | PassingRead) -> None:
        heap = self._layout.heap
        there = heap.tensor(one.member, one.region, torch.uint8, offset=one.offset, numel=one.nbytes)
        if isinstance(one, PassingRead):
            one.use(there)
            return
        one.into.copy_(there)
        if one.region.split("/")[0] in DATA_REGIONS:  # others lie in host memory, as what they are copied into
            heap.lanes.settle()
        one.then()

    def claim(self) -> int:
        return self._protocol.claim_at_home()

    def claims(self) -> int:
        return self._protocol.claims_at_home()
