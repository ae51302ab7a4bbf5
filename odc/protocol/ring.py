"""The staging ring between a pusher and an owner: its two words, and both ends.

Each pair of ranks has a ring of its own with one pusher and one reader, so there is no lock and a slow owner holds up
only what is pushed to it. Blocks are added in the order in which they were posted, but the slot that was given back
last is filled next: an owner that keeps up leaves its blocks in the cache. A block's header therefore names its slot.
"""

from __future__ import annotations

import functools
import struct
from collections import deque
from collections.abc import Callable, Sequence

import torch

from odc.protocol.check import ProtocolChecks
from odc.protocol.layout import HeapLayout
from odc.protocol.regions import HEADER_WORDS, WIRE_DTYPES
from odc.protocol.units import Piece, UnitSpec
from odc.trace import PUSH, recorder

_WIRE_CODES = {dtype: code for code, dtype in enumerate(WIRE_DTYPES)}
_SLOT = 4  # word of a header
_HEADER = struct.Struct(f"={HEADER_WORDS}q")

#: Of a block: index of its unit, first element, elements, code of its dtype, slot.
Header = tuple[int, int, int, int, int]


class RingWords:
    """SENT and ACCUMULATED of the ring from `source` to `owner`; they count blocks since the start."""

    def __init__(self, layout: HeapLayout, owner: int, source: int) -> None:
        sent, accumulated = layout.local(owner).sent, layout.local(owner).accumulated
        if layout.settings.check_protocol:
            checks = ProtocolChecks(layout.grid, layout.peer)
            sent, accumulated = checks.ring(owner, source, sent, accumulated, layout.ring.slots)
        self.posted = sent.loading(source)
        self.post = sent.storing(source)  # data and headers are in place
        self.added = accumulated.loading(source)  # slots that may be filled again
        self.give_back = accumulated.storing(source)  # after the sums


class Outbox:
    """The pusher's end of the ring to one owner, another member than this one; used by one thread at a time."""

    def __init__(self, layout: HeapLayout, owner: int) -> None:
        grid, peer = layout.grid, layout.local(owner)
        distance = grid.distance(grid.me, owner)
        self.owner, self.ring = owner, layout.ring
        self._put, self._lanes = layout.mover.put, layout.heap.lanes
        self._data = peer.staging_address(distance)
        self._ring_bytes: Callable[[], torch.Tensor] = functools.partial(peer.staging, distance)
        self._slots: dict[int, torch.Tensor] = {}
        self._headers = peer.headers(distance).view(-1, HEADER_WORDS).numpy()
        self._raw_headers = self._headers.data.cast("B")
        self._words = RingWords(layout, owner, grid.me)
        self.posted, self._returned = self._words.posted(), self._words.added()
        self._shown = self.posted
        slots = self.ring.slots
        # Slots of the blocks on their way, in the order of posting; the free ones, the next to fill last.
        self._away = deque(int(self._headers[i % slots, _SLOT]) for i in range(self._returned, self.posted))
        self._free = [slot for slot in reversed(range(slots)) if slot not in self._away]

    def ready(self) -> bool:
        """Whether there is a free slot."""
        return bool(self._free) or self.credit() > 0

    def credit(self) -> int:
        """Free slots, with all that the owner has given back."""
        returned = self._words.added()  # acquire: the owner has read what the slots held
        for _ in range(returned - self._returned):
            self._free.append(self._away.popleft())
        self._returned = returned
        return len(self._free)

    def put(self, at_byte: int, address: int, nbytes: int) -> None:
        """Copy `nbytes` from `address` into the slot to be posted next, at `at_byte`. `credit()` must be above 0."""
        self._put(self._data + self._free[-1] * self.ring.slot_bytes + at_byte, address, nbytes)

    def slot(self) -> torch.Tensor:
        """uint8: the slot to be posted next. `credit()` must be above 0."""
        number, size = self._free[-1], self.ring.slot_bytes
        if number not in self._slots:
            self._slots[number] = self._ring_bytes()[number * size : (number + 1) * size]
        return self._slots[number]

    def post(self, unit: UnitSpec, first: int, numel: int, dtype: torch.dtype) -> None:
        """Hand the filled slot over: elements [first, first + numel) of `unit`. On a device `show` makes it visible."""
        slot = self._free.pop()
        self._away.append(slot)
        at = self.posted % self.ring.slots * _HEADER.size
        _HEADER.pack_into(self._raw_headers, at, unit.index, first, numel, _WIRE_CODES[dtype], slot)
        self.posted += 1
        if not self._lanes.asynchronous:
            self.show()

    def show(self) -> bool:
        """Let the owner see all that was posted; whether that was news. On the CPU every post does it.

        On a device it waits for the copies into the slots, so several posts share one wait.
        """
        if self._shown == self.posted:
            return False
        self._lanes.settle()
        return self.announce()

    def announce(self) -> bool:
        """As `show`, of copies that have settled."""
        if self._shown == self.posted:
            return False
        self._words.post(self.posted)  # release: data and header are visible before the head moves
        self._shown = self.posted
        return True


class Inbox:
    """The owner's end of the ring from one source, another member than this one; used by the daemon alone."""

    def __init__(self, layout: HeapLayout, source: int) -> None:
        grid, mine = layout.grid, layout.mine
        distance = grid.distance(source, grid.me)
        self._rank, self._units, self._slots = grid.ranks[source], layout.units, layout.ring.slots
        data = mine.staging(distance).view(-1, layout.ring.slot_bytes)
        self._data = [data.view(dtype) for dtype in WIRE_DTYPES]
        # Made once, as `LocalPeer`'s views: by dtype, slot and elements. A model has few different blocks.
        self._blocks: dict[tuple[int, int, int], torch.Tensor] = {}
        self._headers = mine.headers(distance).numpy().data.cast("B")
        self._words = RingWords(layout, grid.me, source)
        self._taken = self._words.added()

    def waiting(self) -> int:
        """Posted blocks that are not yet taken: slots in use."""
        return self._words.posted() - self._taken

    def headers(self, most: int = 1) -> tuple[Header, ...]:
        """Of the oldest blocks, up to `most` and of one unit; () if there are none."""
        found: list[Header] = []
        begin = self._taken
        end = min(begin + most, self._words.posted())  # acquire: data and headers are visible
        for at in range(begin, end):
            header = _HEADER.unpack_from(self._headers, at % self._slots * _HEADER.size)
            if found and header[0] != found[0][0]:
                break
            found.append(header)
        return tuple(found)

    def blocks(self, headers: Sequence[Header]) -> tuple[UnitSpec, list[Piece]]:
        """What `headers` returned, which is not (): blocks in wire dtype, views into their slots."""
        found: list[Piece] = []
        for _, first, numel, code, slot in headers:
            values = self._blocks.get((code, slot, numel))
            if values is None:
                values = self._blocks[code, slot, numel] = self._data[code][slot, :numel]
            found.append(Piece(first, values))
        return self._units[headers[0][0]], found

    def peek(self, most: int = 1) -> tuple[UnitSpec, list[Piece]] | None:
        """The blocks of `headers`; None if there are none."""
        headers = self.headers(most)
        return self.blocks(headers) if headers else None

    def finish(self, unit: UnitSpec, count: int, nbytes: int, begin: int) -> None:
        """As `take`, of blocks of one unit; records the addition, which began at `begin` on the lane "server"."""
        self.take(count)
        recorder().add(PUSH, begin, unit=unit.name, peer=self._rank, nbytes=nbytes, lane="server")

    def take(self, count: int = 1) -> None:
        """Give the slots of the `count` oldest blocks back to their pusher, after their values were added."""
        self._taken += count
        self._words.give_back(self._taken)  # release: the sum is visible before the credit returns
