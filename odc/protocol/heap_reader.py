"""How a rank reads what lies in other members' heaps, and claims from a queue: by mapped memory, or by an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from odc.protocol.protocol import MemberProtocol


class HeapReader(ABC):
    """Reads of one rank, on any of its threads, after a word that is stored when the bytes are there.

    A queue is asked only after all members have offered.
    """

    @abstractmethod
    def read(self, member: int, region: str, offset: int, into: torch.Tensor, what: str) -> None:
        """Fill `into` with what lies from byte `offset` on in the member's `region`.

        `into` is uint8 [n], in the heap of a rank of this host or in CPU memory of this rank. Returns when it has
        settled. `what` names it in errors.
        """

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

    def read(self, member: int, region: str, offset: int, into: torch.Tensor, what: str) -> None:
        heap = self._layout.heap
        into.copy_(heap.tensor(member, region, torch.uint8, offset=offset, numel=into.numel()))
        heap.lanes.settle()

    def claim(self) -> int:
        return self._protocol.claim_at_home()

    def claims(self) -> int:
        return self._protocol.claims_at_home()
