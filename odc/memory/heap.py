"""A symmetric heap: memory laid out the same on every rank, which every rank can reach.

Chose one small protocol over a base class: a backend (shared memory here; CUDA, NVSHMEM and NIXL later) brings its own
memory and its own way to reach a peer's, and passes the same conformance suite. Regions have names and are asked for
before `seal`, in the same order on every rank; nothing is allocated later. What that costs: sizes must be known when a
model is sharded.

"Member" is an index into `ranks`, the global ranks that share the heap.
"""

from __future__ import annotations

from typing import Protocol

import torch

from odc.memory.lanes import Lanes
from odc.memory.layout import Layout
from odc.memory.words import Words


class SymmetricHeap(Protocol):
    """What every backend offers. Methods that reach a peer attach to it on demand; they may be called from any thread.

    Attributes:
        identity: names the heap, the same on every rank.
        ranks: global ranks by member index.
        me: own member index.
        sealed: whether the memory exists.
        nbytes: of the own memory, 0 before `seal`.
        digest: of the layout, in hex.
        fd: descriptor to hand to peers, where the backend has one.
        device: where data regions lie.
        lanes: the order of work on that device.
    """

    identity: str
    ranks: tuple[int, ...]
    me: int
    device: torch.device
    lanes: Lanes

    @property
    def sealed(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def fd(self) -> int: ...
    @property
    def layout(self) -> Layout: ...

    def allocate(self, name: str, nbytes: int, *, words: bool = False) -> None:
        """Ask for region `name` of `nbytes`; before `seal`, in the same order on every rank. Waits for nobody.

        Args:
            name: of the region.
            nbytes: its size.
            words: processors load and store it (flags, counters, locks), so it lies in their memory, whatever `device`
                is; only such a region has `words`, and its tensors are on the CPU.
        """
        ...

    def seal(self, fingerprint: str = "") -> None:
        """Create the memory, zeroed and present; waits for nobody.

        Raises:
            HeapMemoryError: it does not fit; says what is needed and what is free.
        """
        ...

    def tensor(
        self, member: int, name: str, dtype: torch.dtype, *, offset: int = 0, numel: int | None = None
    ) -> torch.Tensor:
        """1-D view [numel] into region `name` of `member`; it stays valid after `close`.

        Args:
            member: whose memory.
            name: of the region.
            dtype: of the view.
            offset: first element, in elements of `dtype`.
            numel: elements; by default as many as fit.

        Raises:
            LayoutMismatchError: the member laid its heap out otherwise.
            WaitTimeoutError, PeerLostError: the member could not be attached within the deadline.
        """
        ...

    def address(self, member: int, name: str) -> int:
        """Address of region `name` of `member` in this process; valid until `close`. Raises as `tensor` does."""
        ...

    def base_addresses(self) -> torch.Tensor:
        """int64 [len(ranks)]: where each member's memory on `device` starts in this process; attaches all.

        A region of data lies at base + `layout.offset(name)` in each of them. Raises as `tensor` does.
        """
        ...

    def words(self, member: int, name: str) -> Words:
        """Region `name` (allocated with `words`) of `member` as 64-bit words; they stay valid after `close`.

        Raises as `tensor` does.
        """
        ...

    def attached(self, member: int) -> bool:
        """Whether the member's memory can be reached without waiting. Always true of the own, once sealed."""
        ...

    def bytes_by_name(self) -> dict[str, int]:
        """Bytes of each region as asked for, for accounting; `nbytes` is their sum and padding."""
        ...

    def close(self) -> None:
        """Let go of all memory, own and peers'; nothing can be reached through the heap afterwards. Idempotent."""
        ...
