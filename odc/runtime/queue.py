"""The queue of one minibatch: every member offers microbatches and claims the next longest of all until none is left.

Chose one list in falling cost and one counter over work stealing from each other's lists: a claim is one atomic add,
the longest microbatches are under way first wherever they were loaded, and at the end no rank waits for longer than one
microbatch takes, a short one. That is list scheduling (Graham 1969): it needs an order and no cost model, and serves
slow and busy ranks as well as even ones. The price: a claimer reads the tables of all members, 24 bytes a microbatch,
and copies inputs that it has not loaded itself.

    offer   (epoch open: everybody is done with the last one)  home zeroes CLAIMED | table and inputs | OFFERED
    claim   wait: all OFFERED | sort all tables | n = CLAIMED[home]++ | copy the inputs of the n-th

Why it is right. A member offers in an epoch that it has opened, so it has seen everybody DONE with the epoch before:
nobody reads its region, and nobody adds to CLAIMED. A member claims only after it has seen OFFERED of all, home's among
them, so it adds to a counter that was zeroed and reads tables that are whole; and it stores DONE after its last claim.
So the counter hands out 0, 1, 2, ... within one epoch, each number once, and all members agree on which microbatch a
number means, because all sort the same tables by the same rule. A counter at or over the length says: none is left.
Nobody meets for any of this; no member waits for another to *compute*.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from odc.errors import OdcError, UnsupportedError
from odc.memory import Words
from odc.runtime.layout import Space
from odc.runtime.parcel import Parcel, unpack
from odc.runtime.wait import Waiter
from odc.runtime.words import Outcome, Word, decode_outcome, outcome_word

HOME = 0  # the member whose CLAIMED counts
# Words of "claimed" beside CLAIMED, word 0: the member's own, for `odc status`, of its newest offer's epoch.
_MINE = 1  # microbatches that it has claimed
_TOTAL = 2  # 0, or 1 + microbatches that all have offered
_ROW = 3  # of the table: cost (a float's bits), offset of the parcel, its bytes


@dataclass(frozen=True)
class Claimed:
    """A microbatch to compute.

    Args:
        number: place in the queue, 0 for the longest; the same whoever claims it.
        member: which offered it.
        nbytes: of the copy.
        tensors: own copies, by name.
    """

    number: int
    member: int
    nbytes: int
    tensors: dict[str, torch.Tensor]


class Queue:
    """The queue of one root, epoch after epoch; on the rank's main thread.

    Args:
        space: the root's heaps, with `Settings.queue_bytes`.
        waiter: of the root.
    """

    def __init__(self, space: Space, waiter: Waiter) -> None:
        self._space, self._waiter = space, waiter
        self._me = space.geometry.me
        self._board, self._claimed = space.board(self._me), space.claimed(self._me)
        self._order: list[tuple[int, int, int]] | None = None  # (member, offset, bytes), longest first
        self.offered = 0  # the newest epoch in which this rank did
        self.drained = 0  # the newest epoch whose end this rank has seen

    def offer(self, microbatches: Sequence[Mapping[str, torch.Tensor]], costs: Sequence[float] | None = None) -> None:
        """Lay microbatches out for everybody, in the epoch that is open; once an epoch. Waits for nobody.

        Args:
            microbatches: dense CPU tensors by name; copied here.
            costs: of each, finite; larger ones are computed first. None takes their bytes.

        Raises:
            UnsupportedError: they do not fit (says what does), or cannot travel.
            OdcError: a second offer in this epoch.
        """
        epoch = self._board.load(Word.PUBLISHED)
        if self.offered == epoch:
            raise OdcError(f"{self._who(epoch)} offers a second time in one minibatch; offer all microbatches at once")
        parcels = [Parcel(microbatch) for microbatch in microbatches]
        weights = [float(parcel.nbytes) for parcel in parcels] if costs is None else [float(cost) for cost in costs]
        if len(weights) != len(parcels) or not all(map(math.isfinite, weights)):
            raise ValueError(f"{self._who(epoch)}: {len(parcels)} microbatches need as many finite costs, not {costs}")
        region = self._space.offers(self._me)
        places = self._fit(parcels, region.numel(), epoch)
        for word in (0, _MINE, _TOTAL) if self._me == HOME else (_MINE, _TOTAL):
            self._claimed.store(word, 0)
        for place, parcel in zip(places, parcels, strict=True):
            parcel.write(region[place : place + parcel.nbytes])
        words = region.view(torch.int64)
        rows = torch.tensor([places, [parcel.nbytes for parcel in parcels]], dtype=torch.int64).view(2, -1)
        table = words[1 : 1 + _ROW * len(parcels)].view(-1, _ROW)
        table[:, 0] = torch.tensor(weights, dtype=torch.float64).view(torch.int64)
        table[:, 1:] = rows.T
        words[0] = len(parcels)
        self.offered, self._order = epoch, None
        self._board.store(Word.OFFERED, epoch)  # release: counter, table and inputs are visible before it

    def claim(self) -> Claimed | None:
        """The next microbatch, copied from who loaded it; None once all are claimed. After `offer`, in its epoch.

        The first claim of an epoch waits until every member has offered. Whoever claims a microbatch must compute it.
        None also if a member abandoned the minibatch before it offered: nothing computed now would count.

        Raises:
            OdcError: a member ended this minibatch without an offer.
            PeerLostError, WaitTimeoutError: as every wait.
        """
        epoch = self._board.load(Word.PUBLISHED)
        if self.offered != epoch:
            raise OdcError(f"{self._who(epoch)} claims from the queue of a minibatch in which it has offered nothing")
        if self._order is None:
            if not self._await_offers(epoch):
                self.drained = epoch
                return None
            self._order = self._read_order()
            self._claimed.store(_TOTAL, 1 + len(self._order))
        if self.drained == epoch:
            return None
        number = self._space.claimed(HOME).add(0, 1)
        if number >= len(self._order):
            self.drained = epoch
            return None
        member, place, nbytes = self._order[number]
        source = self._space.offers(member)  # held: the memory stays mapped while it is copied
        raw = torch.empty(nbytes, dtype=torch.uint8)
        ctypes.memmove(raw.data_ptr(), source.data_ptr() + place, nbytes)
        self._claimed.store(_MINE, self._claimed.load(_MINE) + 1)
        return Claimed(number, member, nbytes, unpack(raw))

    @property
    def left_early(self) -> bool:
        """Whether this rank offered in its newest epoch and has not claimed until the end."""
        return self.offered > self.drained

    def give_up(self) -> None:
        """The minibatch is abandoned: what is left in the queue of this epoch need not be computed."""
        self.drained = max(self.drained, self.offered)

    def _fit(self, parcels: Sequence[Parcel], room: int, epoch: int) -> list[int]:
        """Where each parcel lies: behind the table, one after the other."""
        end = -(-(1 + _ROW * len(parcels)) * 8 // 64) * 64
        places = []
        for parcel in parcels:
            places.append(end)
            end += parcel.nbytes
        if end > room:
            raise UnsupportedError(
                f"{self._who(epoch)} offers {len(parcels)} microbatches that take {end} bytes; "
                f"Settings(queue_bytes={self._space.settings.queue_bytes}) holds less. Set it to {end} or more, or "
                "offer smaller ones"
            )
        return places

    def _await_offers(self, epoch: int) -> bool:
        """Whether every member has offered; False if one has abandoned the minibatch instead."""
        for member in self._space.geometry.members:
            board, rank = self._space.board(member), self._space.geometry.ranks[member]

            def settled(board: Words = board) -> bool:
                return board.load(Word.OFFERED) >= epoch or board.load(Word.DONE) >= epoch

            self._waiter.until(settled, member, f"rank {rank} to offer its microbatches of epoch {epoch}")
            if board.load(Word.OFFERED) < epoch:
                if decode_outcome(board.load(outcome_word(epoch)), epoch) is Outcome.ABANDONED:
                    return False
                raise OdcError(
                    f"{self._who(epoch)} shares a queue, but rank {rank} ended that minibatch without an offer; every "
                    "rank must call model.claim(), with an empty list if it has loaded nothing",
                    culprit=rank,
                )
        return True

    def _read_order(self) -> list[tuple[int, int, int]]:
        """Every microbatch, costliest first; equal ones by member, then in the order they were offered."""
        rows: list[tuple[float, int, int, int]] = []
        for member in self._space.geometry.members:
            words = self._space.offers(member).view(torch.int64)
            table = words[1 : 1 + _ROW * int(words[0])].view(-1, _ROW)
            costs = table[:, 0].contiguous().view(torch.float64).tolist()
            rows += [(-cost, member, *row) for cost, row in zip(costs, table[:, 1:].tolist(), strict=True)]
        return [(member, place, nbytes) for _, member, place, nbytes in sorted(rows)]

    def _who(self, epoch: int) -> str:
        return f"rank {self._space.geometry.ranks[self._me]} (epoch {epoch})"


def progress(space: Space) -> dict[str, int | None] | None:
    """For `odc status`: what this member has offered and claimed, what all have, and of how many.

    Of its newest epoch; None without a queue, or if it has not offered in that epoch. "total" and "handed_out" are None
    until it has seen every member's offer. Waits for nobody; may be called from any thread.
    """
    me = space.geometry.me
    board = space.board(me)
    offered = board.load(Word.OFFERED)
    if not space.settings.queue_bytes or not offered or offered != board.load(Word.PUBLISHED):
        return None
    words = space.claimed(me)
    total = words.load(_TOTAL) - 1
    return {
        "offered": int(space.offers(me).view(torch.int64)[0]),
        "claimed": words.load(_MINE),
        # Claims after the last microbatch count on. Home is mapped by then: its offer was waited for.
        "handed_out": min(space.claimed(HOME).load(0), total) if total >= 0 else None,
        "total": total if total >= 0 else None,
    }
