"""The queue of one minibatch: every member offers microbatches and claims the next longest of all until none is left.

This is list scheduling (Graham 1969): one list in falling order of cost, and one counter, so a claim is one atomic add,
or one request to the host where the counter lies.
All members sort the same tables by the same rule; a number beyond the list's end means that none is left.
docs/protocol.md explains why it is right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from odc.errors import OdcError, UnsupportedError
from odc.memory import round_up
from odc.protocol.heap_reader import HeapRead, HeapReader
from odc.protocol.layout import HeapLayout
from odc.protocol.packed import PackedMicrobatch, unpack
from odc.protocol.protocol import HOME, MemberProtocol
from odc.protocol.words import ClaimWord, Word
from odc.trace import FETCH, recorder

_TABLE_BYTES = 4096  # of a table that are copied at once; the rest of a longer one follows
_ROW = 3  # words of a table's row: cost (a float's bits), offset of the microbatch, its bytes


@dataclass(frozen=True)
class Claimed:
    """A microbatch to compute: the `number`-th of the queue (0 is the longest), which `member` offered."""

    number: int
    member: int
    nbytes: int
    tensors: dict[str, torch.Tensor]


class Queue:
    """The queue of one root, laid out with `Settings.queue_bytes`, epoch after epoch; on the rank's main thread.

    `heaps` reads what members of other hosts offer, and claims where home is one of them.
    """

    def __init__(self, protocol: MemberProtocol, heaps: HeapReader) -> None:
        self._protocol, self._layout, self._heaps = protocol, protocol.layout, heaps
        self._order: list[tuple[int, int, int]] | None = None  # (member, offset, bytes), longest first
        self.offered = 0  # the newest epoch in which this rank did
        self.drained = 0  # the newest epoch whose end this rank has seen
        self._newest = -1  # number that this rank has claimed last
        self._known = (-1, 0)  # of a home on another host: `_newest` when it was asked, and what it had handed out

    def offer(self, microbatches: Sequence[Mapping[str, torch.Tensor]], costs: Sequence[float] | None = None) -> None:
        """Put microbatches (dense CPU tensors by name; copied) where every rank can claim them, once in the open epoch.

        Those of larger `costs` (finite; None takes their bytes) are computed first. Does not wait. Raises
        UnsupportedError if they do not fit (names what does) or cannot travel, OdcError at a second offer in an epoch.
        """
        epoch = self._protocol.epoch
        if self.offered == epoch:
            raise OdcError(f"{self._who(epoch)} offers a second time in one minibatch; offer all microbatches at once")
        packed = [PackedMicrobatch(microbatch) for microbatch in microbatches]
        weights = [float(one.nbytes) for one in packed] if costs is None else [float(cost) for cost in costs]
        if len(weights) != len(packed) or not all(map(math.isfinite, weights)):
            raise ValueError(f"{self._who(epoch)}: {len(packed)} microbatches need as many finite costs, not {costs}")
        region = self._layout.mine.offers()
        offsets = self._fit(packed, region.numel(), epoch)
        self._protocol.reset_claims()
        for offset, one in zip(offsets, packed, strict=True):
            one.write(region[offset : offset + one.nbytes])
        words = region.view(torch.int64)
        rows = torch.tensor([offsets, [one.nbytes for one in packed]], dtype=torch.int64, device="cpu").view(2, -1)
        table = words[1 : 1 + _ROW * len(packed)].view(-1, _ROW)
        table[:, 0] = torch.tensor(weights, dtype=torch.float64, device="cpu").view(torch.int64)
        table[:, 1:] = rows.T
        words[0] = len(packed)
        self.offered, self._order, self._known = epoch, None, (-1, 0)
        self._protocol.offer()

    def claim(self) -> Claimed | None:
        """The next microbatch, copied from the rank that loaded it; None once all are claimed. After `offer`.

        The first claim of an epoch waits until every member has offered; OdcError if one ended the minibatch without.
        A rank that claims a microbatch must compute it. None also if a member abandoned the minibatch before it
        offered.
        """
        self._protocol.touch("claiming a microbatch")
        epoch = self._protocol.epoch
        if self.offered != epoch:
            raise OdcError(f"{self._who(epoch)} claims from the queue of a minibatch in which it has offered nothing")
        if self._order is None:
            if not self._protocol.await_offers():
                self.drained = epoch
                return None
            self._order = self._read_order()
            self._protocol.note_total(len(self._order))
        if self.drained == epoch:
            return None
        number = self._heaps.claim()
        if number >= len(self._order):
            self.drained = epoch
            return None
        self._newest = number
        member, offset, nbytes = self._order[number]
        raw = self._copy(member, offset, nbytes, f"microbatch {number} of the queue")
        self._protocol.note_claimed()
        if member != self._protocol.grid.me:
            self._protocol.count(Word.FETCHED, nbytes)
        return Claimed(number, member, nbytes, unpack(raw))

    def in_last(self) -> bool:
        """Whether what this rank has claimed last is all that it will get in the open epoch: nothing else is left.

        Asks a home on another host once for every microbatch, and may then raise as `Engine.ask` does.
        """
        if self._order is None or self.offered != self._protocol.epoch or self.drained == self.offered:
            return False
        count = len(self._order)
        return self._newest == count - 1 or self._handed_out() >= count

    def _handed_out(self) -> int:
        if self._known[0] != self._newest or not self._protocol.grid.is_remote(HOME):
            self._known = self._newest, self._heaps.claims()
        return self._known[1]

    def _copy(self, member: int, offset: int, nbytes: int, what: str) -> torch.Tensor:
        """uint8 [nbytes] from `offset` of what a member offers."""
        raw, begin = torch.empty(nbytes, dtype=torch.uint8, device="cpu"), recorder().now()
        self._heaps.read(member, "queue", offset, raw, what)
        if self._protocol.grid.is_remote(member):
            recorder().add(FETCH, begin, unit="queue", peer=self._protocol.grid.ranks[member], nbytes=nbytes)
        return raw

    @property
    def left_early(self) -> bool:
        """Whether this rank offered in its newest epoch and has not claimed until the end."""
        return self.offered > self.drained

    def give_up(self) -> None:
        """The minibatch is abandoned: what is left in the queue of this epoch need not be computed."""
        self.drained = max(self.drained, self.offered)

    def _fit(self, packed: Sequence[PackedMicrobatch], room: int, epoch: int) -> list[int]:
        """Offset of each microbatch: behind the table, one after the other."""
        end = round_up((1 + _ROW * len(packed)) * 8, 64)
        offsets = []
        for one in packed:
            offsets.append(end)
            end += one.nbytes
        if end > room:
            raise UnsupportedError(
                f"{self._who(epoch)} offers {len(packed)} microbatches that take {end} bytes; "
                f"Settings(queue_bytes={self._layout.settings.queue_bytes}) holds less. Set it to {end} or more, or "
                "offer smaller ones"
            )
        return offsets

    def _read_order(self) -> list[tuple[int, int, int]]:
        """Every microbatch, costliest first; equal ones by member, then in the order they were offered."""
        rows: list[tuple[float, int, int, int]] = []
        for member, table in self._tables().items():
            costs = table[:, 0].contiguous().view(torch.float64).tolist()
            rows += [(-cost, member, *row) for cost, row in zip(costs, table[:, 1:].tolist(), strict=True)]
        return [(member, offset, nbytes) for _, member, offset, nbytes in sorted(rows)]

    def _tables(self) -> dict[int, torch.Tensor]:
        """int64 [microbatches, _ROW] by member: what each offers."""
        grid = self._protocol.grid
        # Every rank reads these now: each begins behind its own place, or all would ask the same member at a time.
        members = [*grid.members[grid.me + 1 :], *grid.members[: grid.me + 1]]
        found = self._copy_starts(dict.fromkeys(members, min(self._layout.mine.offers().numel(), _TABLE_BYTES)))
        ends = {member: 1 + _ROW * int(words[0]) for member, words in found.items()}
        found |= self._copy_starts({member: 8 * end for member, end in ends.items() if end > len(found[member])})
        return {member: words[1 : ends[member]].view(-1, _ROW) for member, words in found.items()}

    def _copy_starts(self, sizes: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """int64 by member: the first `sizes[member]` bytes of what it offers."""
        found = {member: torch.empty(nbytes, dtype=torch.uint8, device="cpu") for member, nbytes in sizes.items()}
        begin, what = recorder().now(), "what is in the queue"
        self._heaps.read_all([HeapRead(member, "queue", 0, raw, what) for member, raw in found.items()])
        crossed = sum(nbytes for member, nbytes in sizes.items() if self._protocol.grid.is_remote(member))
        if crossed:
            recorder().add(FETCH, begin, unit="queue", nbytes=crossed)
        return {member: raw.view(torch.int64) for member, raw in found.items()}

    def _who(self, epoch: int) -> str:
        return f"rank {self._protocol.grid.rank} (epoch {epoch})"


def progress(layout: HeapLayout) -> dict[str, int | None] | None:
    """For `odc status`: what this member has offered and claimed, what all have, and of how many.

    Of its newest epoch; None without a queue, or if it has not offered in that epoch. "total" and "handed_out" are None
    until it has seen every member's offer. Does not wait; may be called from any thread.
    """
    board = layout.mine.board
    offered = board.load(Word.OFFERED)
    if not layout.settings.queue_bytes or not offered or offered != board.load(Word.PUBLISHED):
        return None
    words = layout.mine.claims
    total = words.load(ClaimWord.TOTAL) - 1
    home = layout.mine if layout.grid.is_remote(HOME) or total < 0 else layout.local(HOME)
    return {
        "offered": int(layout.mine.offers().view(torch.int64)[0]),
        "claimed": words.load(ClaimWord.MINE),
        # Claims after the last microbatch count on. Home is mapped by then: its offer was waited for. A home on another
        # host is not asked, so that there it is the newest number that this rank has claimed.
        "handed_out": min(home.claims.load(ClaimWord.CLAIMED), total) if total >= 0 else None,
        "total": total if total >= 0 else None,
    }
