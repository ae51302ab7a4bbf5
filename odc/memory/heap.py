"""What every memory backend offers: a symmetric heap, and lanes that order the work of its device.

A symmetric heap is memory laid out the same on every rank, which every rank can reach. Regions have names and are
allocated before `seal`, in the same order on every rank. "Member" is an index into `ranks`, the global ranks that share
the heap. Each backend (shared memory, CUDA, NVSHMEM) passes one conformance suite.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from odc.errors import OdcError
from odc.memory.layout import Layout
from odc.memory.words import Words


class Lanes(Protocol):
    """The order of work that a device finishes later than it is asked to; usable from any thread.

    Two rules hold everywhere. No word may be stored, and no lock released, that announces work which has not settled.
    And lane "server", in which the daemon adds what peers push, never waits for compute: what is added there is ready
    when it is asked for. Otherwise a rank that computes for long would hold up its peers.
    `asynchronous`: whether work may still be in progress when the call that asked for it has returned.
    """

    asynchronous: bool

    def lane(self, name: str) -> AbstractContextManager[object]:
        """Inside the block this thread's device work goes to lane `name`."""

    def mark(self) -> object:
        """A point in this thread's current lane: everything asked for so far."""

    def follow(self, mark: object) -> None:
        """Make the work that this thread asks for from now on wait, on the device, for a mark. Returns at once."""

    def settle(self) -> None:
        """Return once everything in this thread's current lane is done and visible to every peer."""

    def reached(self, mark: object) -> bool:
        """Whether everything before a mark is done and visible to every peer. Does not wait."""


class HostLanes:
    """Lanes of CPU memory, where every copy is complete when it returns."""

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

    def reached(self, mark: object) -> bool:
        return True


class NamedHeap:
    """What the heaps of all backends share: a name for messages, and a layout once they are sealed."""

    identity: str
    ranks: tuple[int, ...]
    me: int
    adds_atomically: bool = True
    _layout: Layout | None = None

    @property
    def sealed(self) -> bool:
        return self._layout is not None

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            raise OdcError(f"{self._who()}: the heap is not sealed yet")
        return self._layout

    def parts(self) -> dict[str, torch.Tensor]:
        return {"": self.whole(self.me)}

    def place(self, name: str) -> tuple[str, int]:
        return "", self.layout.offset(name)

    def whole(self, member: int) -> torch.Tensor:
        raise NotImplementedError

    def _who(self) -> str:
        return f"rank {self.ranks[self.me]}, heap {self.identity}"


class SymmetricHeap(Protocol):
    """A heap of one rank. Methods that reach a peer attach to it on demand, and may be called from any thread.

    `identity` names the heap, the same on every rank; `me` is this rank's member index; `nbytes` is the size of this
    rank's memory, 0 before `seal`; `digest` is a hash of the layout, in hex; `fd` is the descriptor to hand to peers,
    and `read_only_fd` that for readers outside the job, each with `other_fds` beside it, where the backend has them;
    data regions lie on `device`, whose work `lanes` orders.
    """

    identity: str
    ranks: tuple[int, ...]
    me: int
    device: torch.device
    lanes: Lanes
    #: Whether the ranks of this host may add to each other's memory by their device's atomic adds, without a lock. Set
    #: before `seal` to what this rank's mover can; from then on it is what all of these ranks can, over their links,
    #: and asking attaches to all of them. Raises as `tensor` does.
    adds_atomically: bool

    @property
    def sealed(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def fd(self) -> int: ...
    @property
    def other_fds(self) -> tuple[int, ...]: ...
    @property
    def read_only_fd(self) -> int: ...
    @property
    def layout(self) -> Layout: ...

    def allocate(self, name: str, nbytes: int, *, words: bool = False) -> None:
        """Ask for region `name`, unique in the heap, before `seal`, in the same order on every rank. Does not wait.

        With `words`, processors load and store the region (flags, counters, locks), so it lies in CPU memory whatever
        `device` is. Only such a region has `words`.
        """

    def seal(self, fingerprint: str = "") -> None:
        """Create the memory, zeroed and present; does not wait. Raises HeapMemoryError if the heap does not fit."""

    def tensor(
        self, member: int, name: str, dtype: torch.dtype, *, offset: int = 0, numel: int | None = None
    ) -> torch.Tensor:
        """1-D view [numel] into region `name` of `member` from element `offset` on; it stays valid after `close`.

        By default as many elements as fit. Raises LayoutMismatchError if the member laid its heap out differently,
        WaitTimeoutError or PeerLostError if it could not be attached within the deadline.
        """

    def whole(self, member: int) -> torch.Tensor:
        """uint8: all memory of a member on `device`, where `layout` places the regions. Raises as `tensor` does."""

    def parts(self) -> dict[str, torch.Tensor]:
        """uint8: this rank's memory, on `device` and elsewhere, by a name of each part."""

    def place(self, name: str) -> tuple[str, int]:
        """The part in which region `name` lies on every member, and the bytes before it there."""

    def address(self, member: int, name: str) -> int:
        """Address of region `name` of `member` in this process, valid until `close`. Raises as `tensor` does."""

    def words(self, member: int, name: str) -> Words:
        """Region `name` (allocated with `words`) as 64-bit words, valid after `close`. Raises as `tensor` does."""

    def attached(self, member: int) -> bool:
        """Whether the member's memory can be reached without waiting. Always true of this rank's, once sealed."""

    def bytes_by_name(self) -> dict[str, int]:
        """Bytes of each region as asked for; `nbytes` is their sum and padding."""

    def close(self) -> None:
        """Let go of all memory; nothing can be reached through the heap afterwards. Idempotent."""
