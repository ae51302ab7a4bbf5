"""What one piece of a split sample holds, what it sees of the others, and the blocks its attention consists of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from odc.balance.slices import Slices
from odc.errors import PlanError

NO_LABEL = -100


class Sees(Enum):
    """Which keys of a block a query sees."""

    ALL = "all"
    EARLIER = "earlier"  # causal: query i sees keys 0 to i
    LATER = "later"  # query i sees keys i to the last


class Block(NamedTuple):
    """A rectangle of attention that needs no mask.

    Args:
        rows: of this piece's queries.
        owner: place whose keys they are.
        keys: of that place's keys.
        sees: with EARLIER and LATER there are as many rows as keys.
    """

    rows: slice
    owner: int
    keys: slice
    sees: Sees


@dataclass(frozen=True)
class Cut:
    """A sample in pieces; `slices[place]` as in `odc.balance.SplitSample`."""

    slices: list[Slices]

    @cached_property
    def sizes(self) -> list[int]:
        """Tokens of each piece."""
        return [sum(stop - start for start, stop in piece) for piece in self.slices]

    @cached_property
    def length(self) -> int:
        """Tokens of the sample."""
        return sum(self.sizes)

    @cached_property
    def seen(self) -> list[list[int]]:
        """`seen[owner][reader]`: so many of the owner's first tokens lie before the reader's last one."""
        lasts = [piece[-1][1] for piece in self.slices]
        return [
            [sum(max(0, min(stop, last) - start) for start, stop in piece) for last in lasts] for piece in self.slices
        ]

    def owners(self, place: int) -> list[int]:
        """Other places whose keys and values this one reads."""
        return [other for other in range(len(self.slices)) if other != place and self.seen[other][place]]

    def readers(self, place: int) -> list[int]:
        """Other places that read the keys and values of this one."""
        return [other for other in range(len(self.slices)) if other != place and self.seen[place][other]]

    def positions(self, place: int, device: torch.device | None = None) -> Tensor:
        """Position of each token of a piece in the sample, int64."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.slices[place]])

    def take(self, place: int, whole: Tensor) -> Tensor:
        """The piece's part of `whole` [tokens of the sample, ...]."""
        if len(whole) != self.length:
            raise PlanError(f"the plan splits a sample of {self.length} tokens, but {len(whole)} were given")
        return torch.cat([whole[start:stop] for start, stop in self.slices[place]])

    def blocks(self, place: int, window: int | None) -> list[Block]:
        """Attention of a piece's queries to all keys they see, as blocks; rows and keys count from its own 0.

        Causal blocks come first, in which every query occurs once, then others of this place, then those of others.

        Args:
            window: tokens that a token sees, itself included; None sees all before it.
        """
        return _blocks(tuple(tuple(piece) for piece in self.slices), place, window)


def targets_of(labels: Tensor) -> Tensor:
    """What each token has to predict: the label of the next one; the last token predicts nothing."""
    return torch.cat([labels[1:], labels.new_full((1,), NO_LABEL)])


@lru_cache(maxsize=64)
def _blocks(slices: tuple[tuple[tuple[int, int], ...], ...], place: int, window: int | None) -> list[Block]:
    found: list[Block] = []
    row = 0
    for start, stop in slices[place]:
        step = stop - start if window is None else min(window, stop - start)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            at = row + first - start
            for owner, piece in enumerate(slices):
                key = 0
                for begin, end in piece:
                    if begin < last:
                        found += _against(range(first, last), at, owner, range(begin, min(end, last)), key, window)
                    key += end - begin
        row += stop - start
    return sorted(found, key=lambda block: (block.sees is not Sees.EARLIER, block.owner != place))


def _against(queries: range, row: int, owner: int, keys: range, key: int, window: int | None) -> list[Block]:
    """Blocks of the tokens `queries`, whose first is at `row`, and the tokens `keys`, whose first is at `key`.

    The queries are no more than `window`, and are among the keys' slice or all after it. From the last key backwards:
    keys among the queries (causal), keys that every query sees, and keys that only the first queries still see.
    """
    first, count = queries.start, len(queries)

    def block(rows: range, inside: range, sees: Sees) -> list[Block]:
        there = key + inside.start - keys.start
        here = row + rows.start - first
        return [Block(slice(here, here + len(rows)), owner, slice(there, there + len(inside)), sees)] if inside else []

    def within(low: int, high: int) -> range:
        return range(max(low, keys.start), max(min(high, keys.stop), max(low, keys.start)))

    found = block(queries, within(first, queries.stop), Sees.EARLIER)
    if window is None:
        return found + block(queries, within(0, first), Sees.ALL)
    oldest = queries.stop - window  # the oldest key that the last query sees
    found += block(queries, within(oldest, first), Sees.ALL)
    edge = first - window + 1  # the oldest key that the first query sees; query first + t sees edge + t and later
    far = within(edge, min(oldest, first))
    if far:
        skipped = far.start - edge
        found += block(range(first, first + skipped), far, Sees.ALL) if skipped else []
        found += block(range(first + skipped, first + skipped + len(far)), far, Sees.LATER)
    assert count <= window, "queries of a chunk see each other"
    return found
